"""Compute the pass of a prompt once for several attached methods.

With exact prefill, no number of the pass over a prompt depends on the method: `CompressedLayer.update` returns the keys
and values that it is given, and attention computes with these. So the pass of the first method's cache is recorded, and
the caches of the other methods are given the recorded tensors, layer by layer, without running the model. They store
the same bits as in a pass of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from kvq_cli.attention.attach import Attached
from kvq_cli.attention.attention_hooks import check_rotation, watched_attention
from kvq_cli.attention.capture_points import AttentionLayer, CapturePoint, layer_input
from kvq_cli.attention.replaced_attribute import replaced_attribute
from kvq_cli.cache.cache import CompressedCache
from kvq_cli.cache.rows import Forward, Rows
from kvq_cli.cache_argument import cache_argument, cache_name, passed_cache, without_cache
from kvq_cli.models import model_shape

#: Passes whose tensors would take more bytes are not recorded.
MAX_BYTES = 2 << 30


@dataclass
class LayerPass:
    """The tensors that one layer's cache receives in a pass, before pads are cut off.

    input: X `[batch, columns, hidden_size]`; key_before_rope `[batch, kv_heads, columns, head_dim]`; both None where no
    method caches them. query `[batch, query_heads, columns, head_dim]`, key, value `[batch, kv_heads, columns,
    head_dim]`, after RoPE. position_embeddings: the model's (cos, sin), where it passes them to its attention.
    """

    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    input: Tensor | None = None
    key_before_rope: Tensor | None = None
    position_embeddings: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class RecordedPass:
    """A pass over an empty cache. inputs: the model's keyword arguments, without the cache. output: of the model."""

    inputs: Mapping[str, Any]
    output: ModelOutput
    forward: Forward
    rows: Rows
    layers: Sequence[LayerPass]


class SharedPrompts:
    """The prompts that several methods read, one method after the other; they are dropped with this object.

    attached: the methods, of one model. Each method runs the model itself where there is one method alone, where one
    has compressed prefill, where layers hold other states than keys and values, and where the tensors of the recorded
    passes would take more than `MAX_BYTES`.
    """

    def __init__(self, attached: Sequence[Attached]) -> None:
        self._attached, self._recorded, self._room = attached, list[RecordedPass](), 0
        if len(attached) > 1 and all(each.prefill == "exact" and not each.has_states for each in attached):
            self._room = MAX_BYTES
        sources = {plan.keys.source for each in attached for plan in each.plans}
        self._keeps_input, self._keeps_key = "input" in sources, "pre_rope" in sources

    @contextmanager
    def used_by(self, attached: Attached) -> Iterator[None]:
        """Inside the block, the model's first pass over an empty cache of `attached` is recorded, or taken from the
        record of a pass with the same inputs; behind it, the method's newest cache is freed."""
        shared = replaced_attribute(attached.model, "forward", self._shared(attached)) if self._room else nullcontext()
        try:
            with shared:
                yield
        finally:
            attached.forget_cache()  # while the other methods run

    def _shared(self, attached: Attached) -> Callable[..., Any]:
        """The model's `forward`, which records a first pass over an empty cache of `attached` or reads its record."""
        plain = attached.model.forward

        @wraps(plain)
        def forward(input_ids: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
            cache, inputs = passed_cache(kwargs), {**without_cache(kwargs), "input_ids": input_ids}
            unusual = args or torch.is_grad_enabled()
            if input_ids is not None and not unusual and attached.hooks.owns(cache) and cache.get_seq_length() == 0:
                for recorded in self._recorded:
                    if _same(inputs, recorded.inputs):
                        return _replay(recorded, attached, cache)
                if (size := self._bytes(input_ids)) <= self._room:
                    self._room -= size
                    return self._record(plain, cache, inputs)
            return plain(input_ids, *args, **kwargs)

        return forward

    def _bytes(self, ids: Tensor) -> int:
        """Bytes of the tensors that are recorded of a pass over `ids` `[batch, columns]`."""
        model = self._attached[0].model
        shape = model_shape(model)
        heads = shape.query_heads + shape.kv_heads * (3 if self._keeps_key else 2)
        numbers = len(shape.cached_layers) * (heads * shape.head_dim + shape.hidden_size * self._keeps_input)
        return ids.numel() * numbers * model.dtype.itemsize

    def _record(self, plain: Callable[..., Any], cache: CompressedCache, inputs: Mapping[str, Any]) -> Any:
        # Methods that cache keys after RoPE know no capture points.
        layers = [
            next((layer for layer in same if layer.key is not None), same[0])
            for same in zip(*(each.layers for each in self._attached), strict=True)
        ]
        with _recording(layers, self._keeps_input, self._keeps_key) as passes:
            output = plain(**inputs, **cache_argument(cache))
        forward = cache.compressed[0].forward
        # Hidden states and the like would not be given back: a caller that asks for them shares nothing.
        if forward is not None and isinstance(output, ModelOutput) and set(output) == {"logits", cache_name()}:
            kept = type(output)(logits=output["logits"])  # without the first method's cache
            self._recorded.append(RecordedPass(inputs, kept, forward, cache.rows.copy(), passes))
        return output


@contextmanager
def _recording(layers: Sequence[AttentionLayer], inputs: bool, keys: bool) -> Iterator[list[LayerPass]]:
    """Inside the block, fills a `LayerPass` for each layer. inputs, keys: record X and the keys before RoPE."""
    passes: dict[nn.Module, LayerPass] = {layer.module: LayerPass() for layer in layers}

    def watch(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> None:
        taken = passes[module]
        taken.query, taken.key, taken.value = query, key, value

    with ExitStack() as undo:
        undo.enter_context(watched_attention(watch))
        for layer in layers:
            hook = _before_attention(passes[layer.module], inputs)
            undo.callback(layer.module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            if keys and layer.key is not None:
                hook_key = _after_key(passes[layer.module], layer.key)
                undo.callback(layer.key.module.register_forward_hook(hook_key).remove)
        yield list(passes.values())


def _before_attention(taken: LayerPass, inputs: bool) -> Callable[[nn.Module, tuple, dict[str, Any]], None]:
    def hook(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        taken.position_embeddings = kwargs.get("position_embeddings")
        if inputs:
            taken.input = layer_input(args, kwargs)

    return hook


def _after_key(taken: LayerPass, key: CapturePoint) -> Callable[[nn.Module, tuple, Tensor], None]:
    def hook(_module: nn.Module, _args: tuple, output: Tensor) -> None:
        taken.key_before_rope = key.view(output)

    return hook


def _replay(recorded: RecordedPass, attached: Attached, cache: CompressedCache) -> ModelOutput:
    """Give `cache` the tensors of the recorded pass; returns the model's output with this cache."""
    cache.rows = recorded.rows.copy()
    for layer, cached, taken in zip(attached.layers, cache.compressed, recorded.layers, strict=True):
        if taken.query is None or taken.key is None or taken.value is None:
            raise ValueError(f"{layer.name}: its attention was not recorded")
        if taken.position_embeddings is not None and cached.plan.keys.source != "post_rope":
            check_rotation(layer, taken.position_embeddings, recorded.forward)
        cached.begin(recorded.forward)
        if taken.input is not None:
            cached.capture_input(taken.input)
        if taken.key_before_rope is not None:
            cached.capture_key(taken.key_before_rope)
        cached.update(taken.key, taken.value)
        cached.absorb(taken.query)
        cached.release()
    output = {**recorded.output, "logits": recorded.output["logits"].clone(), **cache_argument(cache)}
    return type(recorded.output)(**output)


def _same(inputs: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether two calls of the model have equal arguments."""
    return inputs.keys() == others.keys() and all(_equal(value, others[name]) for name, value in inputs.items())


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        both = isinstance(value, Tensor) and isinstance(other, Tensor)
        return both and value.dtype == other.dtype and torch.equal(value, other)
    return bool(value == other)

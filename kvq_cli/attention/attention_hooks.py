"""The hooks of an attached model, and the attention and mask functions that transformers calls in its forward pass.

A pass with a compressed cache goes: `_before_forward` makes a `ForwardContext` for each attention module; hooks hand
the key before RoPE or the layer input to the cache layer; transformers calls `update` of the layer, then `attention`,
which finds the module's context and lets its backend compute; `_after_forward` removes the contexts.
"""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kvq_cli.artifact.adapters import AdapterWatch
from kvq_cli.attention.capture_points import AttentionLayer, CapturePoint, checkpointed_modules, layer_input
from kvq_cli.attention.forward_context import Backend, ForwardContext
from kvq_cli.attention.rotary import Rotation, has_fixed_rope
from kvq_cli.attention.score_form import PLAIN, ScoreForm
from kvq_cli.cache.cache import CompressedCache
from kvq_cli.cache.rows import Forward, would_sync
from kvq_cli.cache_argument import passed_cache
from kvq_cli.errors import KvqError, NotFiniteError, UsageError
from kvq_cli.layer_kinds import has_chunks
from kvq_cli.methods.base import LayerPlan

#: The name under which transformers knows `attention` and `mask`.
NAME = "kvq"
#: Arguments of transformers' attention functions that change the result: biases, chosen tokens, packed sequences, ....
#: Models forward every other keyword of a call, too (`num_items_in_batch`, the tokenizer of `generate`).
_NOT_COMPUTED = {"position_bias", "attention_bias", "alibi", "head_mask", "layer_head_mask", "indices", "block_indices"}
_NOT_COMPUTED |= {"sinks", "cu_seq_lens_q", "cu_seq_lens_k", "cache"}

#: Contexts of the forward pass that this thread or task computes, by module, since transformers' attention interface
#: receives only the module. Each pass has a table of its own. Nothing outside this file reads or writes it.
_contexts: ContextVar[dict[nn.Module, ForwardContext] | None] = ContextVar("contexts", default=None)
#: The hooks whose queries this thread or task lets see what they would see in one-by-one decoding.
_one_by_one: ContextVar[frozenset[AttentionHooks]] = ContextVar("one_by_one", default=frozenset())
#: What this thread or task lets watch the calls of `attention`.
_watch: ContextVar[Callable[..., None] | None] = ContextVar("watch", default=None)


class AttentionHooks:
    """The hooks that `attach` installs on a model, for caches with its `plans`.

    layers, plans, backends: in layer order. compressed: see `ForwardContext`. max_tokens: the longest prompt that the
    model takes.
    """

    def __init__(
        self,
        decoder: nn.Module,
        layers: Sequence[AttentionLayer],
        plans: Sequence[LayerPlan],
        backends: Sequence[Backend],
        compressed: bool,
        max_tokens: int,
    ) -> None:
        self._decoder, self._layers, self._plans, self._backends = decoder, layers, plans, backends
        self._compressed, self._max_tokens, self._warned = compressed, max_tokens, False
        #: Modules of attention whose outputs or weights are read: those of other parts may be replaced.
        self._watched = [_read_modules(layer, plan) for layer, plan in zip(layers, plans, strict=True)]
        #: See `LayerPlan.longest_pass`.
        self.longest_pass = min((n for plan in plans if (n := plan.longest_pass) is not None), default=None)
        #: Which adapters the model applies.
        self.adapters = AdapterWatch(decoder)
        #: Of each thread: whether decode steps on a GPU gave logits that are not finite.
        self._steps = _Steps()
        #: The cache that was made last.
        self.newest: CompressedCache | None = None

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Inside the block, queries of this thread or task see what they would see in one-by-one decoding."""
        token = _one_by_one.set(_one_by_one.get() | {self})
        try:
            yield
        finally:
            _one_by_one.reset(token)

    def owns(self, cache: object) -> TypeGuard[CompressedCache]:
        """Whether `cache` is a compressed cache of this attach."""
        return isinstance(cache, CompressedCache) and cache.compressed[0].plan is self._plans[0]

    def sees_compressed(self, cache: CompressedCache) -> bool:
        """Whether the queries of the next pass see what they would see in one-by-one decoding."""
        return self._compressed or self in _one_by_one.get() or bool(cache.drafted)

    def install(self, undo: ExitStack) -> None:
        """Put the hooks on the model; `undo` removes them."""
        undo.callback(self.forget_pass)
        self._add(undo, self._decoder.register_forward_pre_hook(self._before_forward, with_kwargs=True))
        self._add(undo, self._decoder.register_forward_hook(self._after_forward, with_kwargs=True))
        # After passes that failed, too: contexts hold the cache, and steps of other models would get no mask.
        self._add(undo, self._decoder.register_forward_hook(lambda *_: self.forget_pass(), always_call=True))
        checked: list[Rotation] = []
        for layer, plan in zip(self._layers, self._plans, strict=True):
            if plan.keys.source == "post_rope":
                continue
            if plan.keys.source == "input":
                hook = self._input_hook(layer)
                self._add(undo, layer.module.register_forward_pre_hook(hook, with_kwargs=True))
            elif layer.key is not None:
                self._add(undo, layer.key.module.register_forward_hook(self._key_hook(layer, layer.key)))
            if not any(layer.rotation is rotation for rotation in checked):
                checked.append(layer.rotation)
                hook = self._rotation_hook(layer, has_fixed_rope(self._decoder))
                self._add(undo, layer.module.register_forward_pre_hook(hook, with_kwargs=True))

    @staticmethod
    def _add(undo: ExitStack, handle: torch.utils.hooks.RemovableHandle) -> None:
        undo.callback(handle.remove)

    def forget_pass(self) -> None:
        """Remove the contexts of this attach: after a pass, and after one that was interrupted."""
        contexts = _contexts.get()
        if contexts is not None and any(context.owner is self for context in contexts.values()):
            others = {module: context for module, context in contexts.items() if context.owner is not self}
            _contexts.set(others or None)

    def _context(self, module: nn.Module) -> ForwardContext | None:
        """The module's context, if its pass was started by these hooks."""
        context = (_contexts.get() or {}).get(module)
        return context if context is not None and context.owner is self else None

    def check_adapters(self, cache: CompressedCache) -> None:
        """UsageError where the model applies other adapters than those that computed the cache, or where one wraps a
        module that the hooks read."""
        applied = self.adapters.applied()
        if not cache.get_seq_length():
            cache.adapters = applied
        if cache.adapters != applied:
            raise UsageError("the model's adapters have changed since this cache was computed: start with new_cache()")
        for layer, modules in zip(self._layers, self._watched, strict=True):
            for name, module in modules.items():
                if layer.module._modules.get(name) is not module:
                    raise UsageError(f"{layer.name}.{name} was replaced, as by an adapter, inside attach: attach anew")

    def _before_forward(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        """Describe the pass and make the contexts, if the cache passed to the decoder is one of this attach."""
        self.forget_pass()
        kwargs = _named(decoder, args, kwargs)
        cache = passed_cache(kwargs)
        inputs = kwargs.get("input_ids")
        inputs = kwargs.get("inputs_embeds") if inputs is None else inputs
        if inputs is None or not self.owns(cache):
            self._check_dropped(inputs, kwargs)
            return
        if self._decoder.training and checkpointed_modules(self._decoder):
            raise UsageError(
                "with gradient checkpointing in training mode, transformers takes the compressed cache from the "
                "layers: call model.eval(), or turn gradient checkpointing off"
            )
        self.check_adapters(cache)
        batch, columns = inputs.shape[:2]
        mask, positions = _padding_mask(kwargs.get("attention_mask")), _text_positions(kwargs.get("position_ids"))
        forward = cache.begin(columns, batch, mask, positions)
        longest = max(span.tokens for span in forward.row_spans)
        if columns > 1 and longest > self._max_tokens:
            raise UsageError(f"the prompt has {longest} tokens, the model's context is {self._max_tokens}: shorten it")
        self.check_context(longest)
        if cache.drafts and cache.drafted is None:
            raise UsageError("drafted tokens come by another model object than the attached one: attach that")
        compressed = self.sees_compressed(cache)
        if compressed and self.longest_pass is not None and columns > self.longest_pass:
            raise UsageError(
                f"codes of all layers together: give at most {self.longest_pass} tokens at once (recent), or call the "
                "model itself, which cuts longer passes"
            )
        contexts = dict(_contexts.get() or {})
        for layer, backend, cached in zip(self._layers, self._backends, cache.compressed, strict=True):
            cached.begin(forward)
            contexts[layer.module] = ForwardContext(cached, forward, backend, compressed, owner=self)
        _contexts.set(contexts)
        cache.unfinished = bool(cache.states)

    def _check_dropped(self, inputs: Tensor | None, kwargs: Mapping[str, Any]) -> None:
        """UsageError where transformers dropped the cache, as it does with Phi-3's long RoPE: beyond the original
        context all keys are rotated by other angles, so that `generate` computes the text anew without the cache.

        Its length is that of the mask: transformers before 5.20 passes the last token alone.
        """
        config = getattr(self._decoder, "config", None)
        original = getattr(config, "original_max_position_embeddings", None)
        if original is None or self.newest is None or passed_cache(kwargs) is not None or inputs is None:
            return
        mask = kwargs.get("attention_mask")
        tokens = max(inputs.shape[1], mask.shape[-1] if isinstance(mask, Tensor) else 0)
        if kwargs.get("use_cache") and tokens > original and self.newest.get_seq_length() <= original:
            raise UsageError(
                f"this model changes its RoPE at {original} tokens, where transformers drops the compressed cache: "
                "keep prompt and answer within that"
            )

    def check_context(self, tokens: int) -> None:
        """Warn, once per attach, of a sequence of more `tokens` than the model's context."""
        if tokens > self._max_tokens and not self._warned:
            self._warned = True
            warnings.warn(
                f"decoding beyond the model's context of {self._max_tokens} tokens: it was not trained for longer ones",
                stacklevel=2,
            )

    def check_logits(self, _model: nn.Module, _args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """After a pass of the whole model with a compressed cache: NotFiniteError for logits that are NaN or infinite.

        The best token of every position tells: it is NaN or infinite with any of them, but for -inf, which bars a
        token. Decode steps on a GPU do not wait for the answer: `check_steps` gives it.
        """
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or not logits.numel() or not self.owns(passed_cache(kwargs)):
            return
        wrong = ~logits.detach().amax(dim=-1).isfinite().all()
        if would_sync(logits.device, logits.shape[1]):
            before = self._steps.wrong
            self._steps.wrong = wrong if before is None else before | wrong
            return
        self._steps.wrong = None  # of an answer that was given up
        if wrong:
            raise _not_finite()

    def check_steps(self) -> None:
        """NotFiniteError where a decode step of this thread, since the last call, gave logits that are not finite."""
        wrong, self._steps.wrong = self._steps.wrong, None
        if wrong is not None and bool(wrong):
            raise _not_finite()

    def _after_forward(self, decoder: nn.Module, args: tuple, kwargs: dict[str, Any], _output: object) -> None:
        for layer in self._layers:
            context = self._context(layer.module)
            if context is not None and not context.computed:
                raise KvqError(f"{layer.name} did not compute its attention with kvq: was its implementation changed?")
        cache = passed_cache(_named(decoder, args, kwargs))
        if self.owns(cache):
            cache.unfinished = False
        self.forget_pass()

    def _key_hook(self, layer: AttentionLayer, key: CapturePoint) -> Callable[[nn.Module, tuple, Tensor], None]:
        """After the module that last shapes the key before RoPE: hand it to the cache."""

        def hook(_module: nn.Module, _args: tuple, output: Tensor) -> None:
            context = self._context(layer.module)
            if context is not None:
                context.layer.capture_key(key.view(output))

        return hook

    def _input_hook(self, layer: AttentionLayer) -> Callable[[nn.Module, tuple, dict[str, Any]], None]:
        """Before the attention module: hand the layer input to the cache."""

        def hook(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            context = self._context(layer.module)
            if context is not None:
                context.layer.capture_input(layer_input(args, kwargs))

        return hook

    def _rotation_hook(self, layer: AttentionLayer, fixed: bool) -> Callable[[nn.Module, tuple, dict[str, Any]], None]:
        """Before the attention module: check that the model's (cos, sin) is the rotation that the cache will use.

        fixed: it does not depend on the length of the text, so that the check of the prompt holds for every step.
        """

        def hook(module: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
            embeddings, context = kwargs.get("position_embeddings"), self._context(module)
            if embeddings is None or context is None:
                return
            if not (fixed and would_sync(embeddings[0].device, context.forward.columns)):
                check_rotation(layer, embeddings, context.forward)

        return hook


def _named(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of a module by name."""
    return {**inspect.signature(module.forward).bind_partial(*args).arguments, **kwargs} if args else kwargs


def _read_modules(layer: AttentionLayer, plan: LayerPlan) -> dict[str, nn.Module]:
    """By name, the modules of a layer's attention that its cache depends on as `attach` saw them."""
    children = {name: module for name, module in layer.module.named_children() if plan.keys.source != "post_rope"}
    if plan.keys.source == "input":
        return {name: module for name, module in children.items() if name not in ("q_proj", "o_proj")}
    return {name: module for name, module in children.items() if layer.key is not None and module is layer.key.module}


def _padding_mask(mask: object) -> Tensor | None:
    """The mask `[batch, tokens so far]` of pads, from one that the model got, or from those by kind of layer that a
    multimodal model prepares for its decoder: the last token sees all tokens but pads."""
    if isinstance(mask, Mapping) and "full_attention" in mask:
        mask = mask["full_attention"]
        if isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.ndim == 4:
            return mask[:, 0, -1]
    elif isinstance(mask, Tensor):
        return mask
    if mask is not None:
        raise UsageError("a compressed cache needs a 2-D attention_mask of zeros and ones, not prepared masks")
    return None


def _text_positions(positions: Tensor | None) -> Tensor | None:
    """Positions `[batch, tokens]`, which multimodal models pass once for time, height and width of images, sometimes
    after those in the text; UsageError where they differ."""
    if positions is None or positions.ndim != 3:
        return positions
    text, *others = positions[-3:]
    known = would_sync(positions.device, positions.shape[2])  # those of the prompt were the same
    if not known and not all(torch.equal(text, other) for other in others):
        raise UsageError("positions of images are not supported by a compressed cache: give text alone")
    return text


class _Steps(threading.local):
    """What a thread's decode steps gave. wrong: whether any logit was not finite, on their device."""

    wrong: Tensor | None = None


def _not_finite() -> NotFiniteError:
    return NotFiniteError("the model's logits contain NaN or infinity (try --dtype float32)")


def check_rotation(layer: AttentionLayer, embeddings: tuple[Tensor, Tensor], forward: Forward) -> None:
    """UsageError where the model's (cos, sin) of a pass, `[batch, columns, width]`, is not the layer's rotation."""
    span = forward.row_spans[0]
    if layer.rotation.style == "none" or span.tokens == span.past:
        return
    cos, sin = (table[0, -1] for table in embeddings)
    if not layer.rotation.agrees(cos, sin, span.last_position):
        raise UsageError(
            f"{layer.name}: this model's RoPE changes with the length of the text, so that keys cached before "
            "RoPE cannot be turned later: use a method that caches keys after RoPE"
        )


def register() -> None:
    """Make `attention` and `mask` known to transformers under `NAME`."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


@contextmanager
def watched_attention(watch: Callable[..., None]) -> Iterator[None]:
    """Inside the block, calls `watch` with the arguments of each call of `attention` by this thread or task, before
    it."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


@contextmanager
def recorded_score_forms() -> Iterator[dict[nn.Module, ScoreForm]]:
    """Inside the block, fills a table with the score form that each attention module asks for when it runs."""
    forms: dict[nn.Module, ScoreForm] = {}

    def record(module: nn.Module, *_: Any, **kwargs: Any) -> None:
        _refuse_unknown(module, kwargs)
        forms[module] = ScoreForm.of(kwargs.get("softcap"), kwargs.get("s_aux"))

    with watched_attention(record):
        yield forms


def mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """transformers' mask interface. A decode step of the compressed cache needs no mask: on a GPU none is made, since
    whether there are pads would be read back from it. Chunked attention, which is not compressed, needs one."""
    config, device = kwargs.get("config"), torch.device(kwargs.get("device", "cpu"))
    if _contexts.get() and would_sync(device, kwargs["q_length"]) and not (config and has_chunks(config)):
        return None
    return sdpa_mask(*args, **kwargs)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: `[batch, heads, tokens, head_dim]` -> `[batch, tokens, heads, head_dim]`."""
    watch = _watch.get()
    if watch is not None:
        watch(module, query, key, value, attention_mask, softcap=softcap, s_aux=s_aux, dropout=dropout, **kwargs)
    form = ScoreForm.of(softcap, s_aux)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling

    def uncompressed() -> tuple[Tensor, None]:
        if form is PLAIN:
            return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)
        _refuse_unknown(module, {**kwargs, "dropout": dropout})
        return form.attention(query, key, value, attention_mask, scaling), None

    contexts = _contexts.get()
    context = None if contexts is None else contexts.get(module)
    if contexts is None or context is None:
        return uncompressed()
    _refuse_unknown(module, {**kwargs, "dropout": dropout})
    if context.computed:
        raise UsageError(f"{type(module).__name__} calls attention twice per forward: unsupported")
    layer = context.layer
    forward = context.forward if layer.forward is None else layer.forward  # counted from behind dropped tokens
    context = replace(context, forward=forward, scaling=scaling, score_form=form, computed=True)
    contexts[module] = context
    if kwargs.get("sliding_window") != layer.sliding_window:
        raise UsageError(f"layer {layer.index}: its sliding window is not the one that the model's config announces")
    forward.check_mask(attention_mask, layer.sliding_window)
    layer.absorb(query)
    if forward.is_first and not context.compressed:
        layer.release()
        return uncompressed()
    if forward.columns == 1:
        out = context.backend.decode_attention(query, context)
    else:
        out = context.backend.prefill_attention(query, key, value, context)
    layer.release()
    return out.transpose(1, 2).contiguous(), None


def _refuse_unknown(module: nn.Module, kwargs: Mapping[str, Any]) -> None:
    """UsageError for attention that is more than softmax(scaling q K^T + mask) V in a form that `ScoreForm` knows."""
    if kwargs.get("dropout"):
        raise UsageError("kvq computes no attention dropout: call model.eval() first")
    if not getattr(module, "is_causal", True) or kwargs.get("is_causal") is False:
        raise UsageError(f"{type(module).__name__}: attention that is not causal is not supported")
    for name in sorted(_NOT_COMPUTED & kwargs.keys()):
        if kwargs[name] is not None:
            raise UsageError(f"{type(module).__name__} passes {name} to its attention, which kvq does not compute")

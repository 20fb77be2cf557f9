"""The attention layers of a model and their capture points: where the pre-RoPE key, the value and the input appear.

The only place that knows how transformers lays out attention. It copies no model's code: the key before RoPE is the
output of the module that last shapes it (`k_norm`, else `k_proj`, else the key part of a module for queries, keys and
values), which holds for Llama, Mistral, Qwen, Phi, Gemma, OLMo, GLM, Cohere, GPT-NeoX, GPT-2 and others alike, and is
checked: a short forward pass compares the outputs of these points with what the model gives to its cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from kvq_cli.attention.rotary import Rotation, find_rotation
from kvq_cli.attention.score_form import PLAIN, ScoreForm
from kvq_cli.cache_argument import cache_argument
from kvq_cli.errors import KvqError, UsageError, reason
from kvq_cli.layer_kinds import has_states, layer_kinds
from kvq_cli.methods.base import ModelShape
from kvq_cli.models import model_shape, text_config
from kvq_cli.offload import compute_devices

#: Names of the list of layers in models, and of the attention in a layer.
_LAYERS, _ATTENTION = ("layers", "h"), ("self_attn", "attention", "attn", "mixer")
#: Fused query-key-value modules -> whether outputs are grouped by head; else all queries come first.
_FUSED = {"qkv_proj": False, "c_attn": False, "query_key_value": True}
#: Modules that shape a key before RoPE, last one first.
_KEY_NAMES = ("k_norm", "k_layernorm", "k_proj", *_FUSED)
_VALUE_NAMES = ("v_norm", "v_proj", *_FUSED)


@dataclass(frozen=True)
class CapturePoint:
    """The output of `module`, or its channels `start:stop`, as `[batch, kv_heads, tokens, head_dim]`.

    heads_first: the module's output already is `[batch, kv_heads, tokens, head_dim]`. place: which of the three numbers
    of each head it is, where the output holds query, key and value of a head together.
    """

    module: nn.Module
    heads: int
    head_dim: int
    start: int = 0
    stop: int | None = None
    heads_first: bool = False
    place: int | None = None

    def view(self, output: Tensor) -> Tensor:
        """`output` of the module, `[batch, tokens, channels]`, `[batch, tokens, kv_heads, head_dim]` or
        `[batch, kv_heads, tokens, head_dim]`, as a view of shape `[batch, kv_heads, tokens, head_dim]`."""
        if self.heads_first:
            return output
        if self.place is not None:
            output = output.unflatten(-1, (self.heads, 3, self.head_dim))[..., self.place, :]
        if self.stop is not None:
            output = output[..., self.start : self.stop]
        return output.reshape(*output.shape[:2], self.heads, self.head_dim).transpose(1, 2)


@dataclass
class Probe:
    """The tensors of one attention module in a short forward pass.

    tokens: their number. input: X `[1, tokens, hidden_size]`. inputs, outputs: of candidate modules for capture points,
    by id of the module. key, value: as passed to the cache.
    """

    tokens: int
    input: Tensor = field(default_factory=lambda: torch.empty(0))
    inputs: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Tensor] = field(default_factory=dict)
    key: Tensor = field(default_factory=lambda: torch.empty(0))
    value: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass(frozen=True)
class AttentionLayer:
    """One attention module of a model, and its capture points.

    index: of the layer in the model, of which other layers may have no cache to compress.
    key, value: None where they were not requested.
    rotation: the RoPE between captured and cached key (style "none" for a layer without RoPE, and where capture points
    were not requested). sliding_window: newest tokens that a query sees, itself included; None: all.
    probe: the tensors of a short forward pass.
    score_form: how scores become weights; set by `attach`.
    """

    index: int
    name: str
    module: nn.Module
    key: CapturePoint | None
    value: CapturePoint | None
    rotation: Rotation
    sliding_window: int | None
    probe: Probe = field(repr=False)
    score_form: ScoreForm = PLAIN


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The submodule that owns the decoder layers and makes their masks (`model.model` of a `...ForCausalLM`)."""
    decoders = [m for m in model.modules() if isinstance(m, PreTrainedModel) and isinstance(_layers(m), nn.ModuleList)]
    if len(decoders) != 1:
        raise UsageError(f"{type(model).__name__}: kvq needs a decoder-only model with one stack of layers")
    return decoders[0]


def attention_modules(model: PreTrainedModel) -> list[tuple[int, str, nn.Module]]:
    """(index, name, module) of the attention of each layer with a cache to compress, in layer order."""
    names = {id(module): name for name, module in model.named_modules()}
    modules: list[tuple[int, str, nn.Module]] = []
    layers = _layers(decoder_of(model)) or nn.ModuleList()
    for index in model_shape(model).cached_layers:
        candidates = (getattr(layers[index], name, None) for name in _ATTENTION)
        module = next((candidate for candidate in candidates if candidate is not None), None)
        if module is None or not isinstance(getattr(module, "layer_idx", None), int):
            tried = ", ".join(_ATTENTION)
            raise UsageError(f"{type(model).__name__}: layer {index} has none of {tried} with a layer_idx")
        modules.append((index, names[id(module)], module))
    return modules


def attention_layers(model: PreTrainedModel, points: bool = True) -> list[AttentionLayer]:
    """The attention layers of `model`, in order. Runs the decoder once on a few random embeddings.

    points: also find the capture points of keys before RoPE and values; not needed where keys are cached after RoPE.
    Raises UsageError naming the module whose capture points do not give the tensors that the model caches, KvqError
    where these contain NaN.
    """
    shape, config = model_shape(model), text_config(model.config)
    windows, decoder = sliding_windows(config), decoder_of(model)
    kinds = getattr(config, "layer_types", None) or [""] * shape.layers
    # The number of tokens differs from the number of heads, so that the two dimensions cannot be mixed up.
    probes = _probe(model, tokens=shape.kv_heads + 3)
    layers = []
    for index, name, module in attention_modules(model):
        probe = probes[index]
        if not (probe.key.isfinite().all() and probe.value.isfinite().all()):
            raise KvqError(
                f"{name}: its keys or values hold NaN or infinity: check the weights, or try --dtype float32"
            )
        expected = (1, shape.kv_heads, probe.tokens, shape.head_dim)
        for kind, cached in (("key", probe.key), ("value", probe.value)):
            if cached.shape != expected:
                raise UsageError(
                    f"{name}: caches {kind}s of shape {tuple(cached.shape)} where its config means {expected}: "
                    "attention of this kind is not supported"
                )
        if not points:
            unrotated = Rotation("none", probe.key.new_zeros(0), probe.key.shape[-1])
            layers.append(AttentionLayer(index, name, module, None, None, unrotated, windows[index], probe))
            continue
        key = _capture_point(module, name, _KEY_NAMES, shape, probe, part=1)
        value = _capture_point(module, name, _VALUE_NAMES, shape, probe, part=2)
        if not torch.equal(value.view(probe.outputs[id(value.module)]), probe.value):
            raise UsageError(f"{name}: the cached value is not the output of {type(value.module).__name__}")
        before = key.view(probe.outputs[id(key.module)])
        rotation = find_rotation(getattr(decoder, "rotary_emb", None), kinds[index], before, probe.key)
        if rotation is None:
            raise UsageError(f"{name}: the cached key is no rotation (half or interleaved) of the key before RoPE")
        layers.append(AttentionLayer(index, name, module, key, value, rotation, windows[index], probe))
    return layers


def checkpointed_modules(model: nn.Module) -> list[Any]:
    """The modules with gradient checkpointing, which works in training mode."""
    return [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]


def layer_input(args: tuple, kwargs: dict) -> Tensor:
    """X `[batch, tokens, hidden_size]` of a call of an attention module."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def sliding_windows(config: Any) -> list[int | None]:
    """Per layer, the sliding window (None: all tokens are seen)."""
    window = getattr(config, "sliding_window", None)
    return [window if kind == "sliding_attention" else None for kind in layer_kinds(config)]


def _layers(module: nn.Module) -> nn.ModuleList | None:
    candidates = (getattr(module, name, None) for name in _LAYERS)
    return next((candidate for candidate in candidates if candidate is not None), None)


def _capture_point(
    module: nn.Module, name: str, candidates: Sequence[str], shape: ModelShape, probe: Probe, part: int
) -> CapturePoint:
    """The last module that shapes a key (part 1) or value (part 2); see `CapturePoint` for its layouts."""
    for candidate in candidates:
        child = getattr(module, candidate, None)
        if child is None or id(child) not in probe.outputs:
            continue
        output, size = probe.outputs[id(child)], shape.kv_heads * shape.head_dim
        if candidate in _FUSED:
            if output.shape[-1] != shape.query_heads * shape.head_dim + 2 * size:
                continue
            if _FUSED[candidate] and shape.query_heads == shape.kv_heads:
                return CapturePoint(child, shape.kv_heads, shape.head_dim, place=part)
            start = shape.query_heads * shape.head_dim + (part - 1) * size
            return CapturePoint(child, shape.kv_heads, shape.head_dim, start, start + size)
        if output[0].numel() == probe.tokens * size:
            heads_first = output.ndim == 4 and output.shape[1] == shape.kv_heads
            return CapturePoint(child, shape.kv_heads, shape.head_dim, heads_first=heads_first)
    raise UsageError(f"{name}: none of {', '.join(candidates)} gives {shape.kv_heads} kv heads of {shape.head_dim}")


class _ProbeCache(DynamicCache):
    """Stores keys and values passed to the cache in the probes of their layers. config: of a model whose other layers
    keep states."""

    def __init__(self, probes: Mapping[int, Probe], config: PretrainedConfig | None) -> None:
        super().__init__(config=config)
        self._probes, self.updated = probes, set[int]()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if layer_idx in self._probes:
            self._probes[layer_idx].key, self._probes[layer_idx].value = key_states, value_states
            self.updated.add(layer_idx)
        return key_states, value_states


@torch.no_grad()
def _probe(model: PreTrainedModel, tokens: int) -> dict[int, Probe]:
    """The probes of the layers by index, from a forward pass over random embeddings of `tokens` tokens."""
    decoder, modules = decoder_of(model), {index: module for index, _, module in attention_modules(model)}
    probes = {index: Probe(tokens) for index in modules}
    cache = _ProbeCache(probes, model.config if has_states(text_config(model.config)) else None)
    weight: Any = model.get_input_embeddings().weight
    noise = torch.Generator().manual_seed(0)
    embeds = torch.randn(1, tokens, weight.shape[1], generator=noise, dtype=torch.float32)
    embeds = embeds.to(compute_devices(decoder)[0], weight.dtype)
    # In training mode, transformers takes the cache from layers with gradient checkpointing.
    checkpointed = checkpointed_modules(decoder)
    with ExitStack() as undo:
        for index, module in modules.items():
            probe = probes[index]
            undo.callback(module.register_forward_pre_hook(_input_recorder(probe), with_kwargs=True).remove)
            for name in {*_KEY_NAMES, *_VALUE_NAMES}:
                if isinstance(child := getattr(module, name, None), nn.Module):
                    undo.callback(child.register_forward_hook(_output_recorder(probe)).remove)
        for each in checkpointed:
            undo.callback(setattr, each, "gradient_checkpointing", True)
            each.gradient_checkpointing = False
        try:
            decoder(inputs_embeds=embeds, **cache_argument(cache), use_cache=True)
        except (ValueError, TypeError, AttributeError, KeyError) as error:  # as of a layer without a cache
            why = reason(error)
            message = f"{type(model).__name__} does not run with a key-value cache from outside: {why}"
            raise UsageError(message) from error
    missing = [index for index in modules if index not in cache.updated]
    if missing:
        raise UsageError(f"{type(model).__name__}: layer {missing[0]} does not use a key-value cache of its own")
    return probes


def _input_recorder(probe: Probe) -> Callable[[nn.Module, tuple, dict[str, Any]], None]:
    def hook(_module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        probe.input = layer_input(args, kwargs)

    return hook


def _output_recorder(probe: Probe) -> Callable[[nn.Module, tuple, Tensor], None]:
    def hook(module: nn.Module, args: tuple, output: Tensor) -> None:
        probe.inputs[id(module)], probe.outputs[id(module)] = args[0], output

    return hook

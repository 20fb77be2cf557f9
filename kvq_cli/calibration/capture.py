"""Run the model over calibration text and capture pre-RoPE keys, values, and the loss's gradients to both."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from kvq_cli.attention.capture_points import AttentionLayer, CapturePoint, decoder_of
from kvq_cli.attention.replaced_attribute import replaced_attribute
from kvq_cli.calibration import blocked_attention
from kvq_cli.calibration.loss import hidden_gradient
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.layer_kinds import has_chunks, layer_kinds
from kvq_cli.models import text_config
from kvq_cli.upcast import upcast_products

#: Receives the captured numbers: layer index, "k" or "v", "x" (activations) or "g" (gradients), and a tensor
#: `[tokens, kv_heads, head_dim]` in the model's dtype.
CaptureCallback = Callable[[int, str, str, Tensor], None]
#: Held while hooks are added or removed. PyTorch numbers them without a lock: of two hooks of a module to which threads
#: gave the same number, one is lost.
_HOOKS = threading.Lock()
_DESCRIPTIONS = {"k": "keys", "v": "values", "x": "", "g": "gradients of the "}


def capture(
    model: PreTrainedModel,
    layers: Sequence[AttentionLayer],
    tokens: Tensor,
    on_capture: CaptureCallback,
    *,
    gradients: bool,
    near: int = 0,
    threads: bool = False,
) -> None:
    """Run one sample `[tokens]` through the model, calling `on_capture` with each layer's keys and values, as a cache
    gets them but before RoPE.

    gradients: also run the backward pass of the loss, the sum of the next-token cross entropies, and capture d loss /
    d key and d loss / d value; zeros where a module above has no backward pass. Weights are frozen and get no
    gradients. The model's dtype is kept throughout.
    near: of these gradients, the part through predictions that read keys and values packed: not those of the token
    itself and of the `near` - 1 tokens behind it. All, if 0; else attention must be that of `blocked_attention`.
    threads: other threads run their samples through the same model; capture those of the calling thread only.
    Raises KvqError naming the layer where numbers are not finite.
    """
    recorder = _Recorder(on_capture, gradients, near > 0, threading.get_ident() if threads else None)
    ids = tokens[None].to(model.device)
    decoder = decoder_of(model)
    with ExitStack() as hooks, torch.set_grad_enabled(gradients), upcast_products(model):
        hooks.enter_context(_recording(recorder, layers))
        if near:
            windows = {layer.module: layer.sliding_window for layer in layers}
            packed = blocked_attention.PackedGradients(near, windows, recorder.receiver(layers))
            hooks.enter_context(blocked_attention.packed_gradients(packed))
        output = decoder(input_ids=ids, use_cache=False)
        recorder.recording = False  # checkpointed layers run again in the backward pass
        if gradients:
            with suppress(NotImplementedError):  # of a function without a backward pass
                gradient = hidden_gradient(model, output, ids)
                if output.last_hidden_state.requires_grad:
                    output.last_hidden_state.backward(gradient)
            recorder.fill_gradients()


@contextmanager
def _recording(recorder: _Recorder, layers: Sequence[AttentionLayer]) -> Iterator[None]:
    """With the recorder's hooks on the capture points of all layers."""

    def remove(handle: RemovableHandle) -> None:
        with _HOOKS:
            handle.remove()

    with ExitStack() as undo:
        for layer in layers:
            for kind, point in (("k", layer.key), ("v", layer.value)):
                if point is None:
                    raise ValueError(f"{layer.name}: its capture points were not requested")
                kept, recorded = recorder.keep(layer.index, kind), recorder.record(layer.index, kind, point)
                for module, hook in ((point.module, kept), (layer.module, recorded)):
                    with _HOOKS:
                        undo.callback(remove, module.register_forward_hook(hook))
        yield


def forward(model: PreTrainedModel, tokens: Tensor) -> None:
    """Run one sample `[tokens]` through the model's layers, without gradients, for the hooks on its modules."""
    with torch.no_grad(), upcast_products(model):
        decoder_of(model)(input_ids=tokens[None].to(model.device), use_cache=False)


@contextmanager
def blocked_attention_on_cpu(
    model: PreTrainedModel, layers: Sequence[AttentionLayer], always: bool = False
) -> Iterator[None]:
    """On a CPU, compute plain causal attention with `blocked_attention`, which keeps no weights; or `always`."""
    decoder, config = decoder_of(model), text_config(model.config)
    before = decoder.config._attn_implementation
    if has_chunks(config):
        if always:
            layer = layer_kinds(config).index("chunked_attention")
            raise UsageError(
                f"layer {layer} has chunked attention, through which this method's gradients are not computed: "
                "calibrate another method (temporalkv, kvquant, channelkv)"
            )
        yield
        return
    plain = all(layer.sliding_window is None for layer in layers) and not getattr(
        decoder.config, "attention_dropout", 0
    )
    if not always and (model.device.type != "cpu" or before != "sdpa" or not plain):
        yield
        return
    blocked_attention.register()
    decoder.set_attn_implementation(blocked_attention.NAME)
    try:
        yield
    finally:
        decoder.set_attn_implementation(before)


@contextmanager
def gradient_checkpointing(model: PreTrainedModel, count: int) -> Iterator[None]:
    """Recompute the activations of the first `count` layers in the backward pass instead of keeping them.

    The layers stay in evaluation mode. transformers' own checkpointing needs training mode, in which layers of some
    models (OPT's) drop activations.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    with ExitStack() as undo:
        for layer in layers[:count]:
            undo.enter_context(replaced_attribute(layer, "forward", _checkpointed(model, layer.forward)))
        yield


def _checkpointed(model: PreTrainedModel, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward` of a layer of `model`, with activations that are recomputed in the backward pass."""
    options: dict[str, Any] = {"use_reentrant": False, "context_fn": lambda: _computing_twice(model)}

    @wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, preserve_rng_state=False, **kwargs)  # nothing is random

    return recomputed


def _computing_twice(model: PreTrainedModel) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Contexts of a layer's forward pass, and of its repetition in the backward pass, outside of all other contexts."""
    first, second = blocked_attention.output_contexts()

    @contextmanager
    def repeated() -> Iterator[None]:
        with second, upcast_products(model):
            yield

    return first, repeated()


class _Recorder:
    """Hooks that make captured outputs require gradients, and pass activations and gradients to `on_capture`."""

    def __init__(self, on_capture: CaptureCallback, gradients: bool, packed: bool, thread: int | None) -> None:
        self.on_capture, self.gradients, self.thread, self.recording = on_capture, gradients, thread, True
        self._packed = packed  # gradients come from attention, by `receiver`
        #: Outputs of capture points whose attention module has not returned, by layer and kind.
        self._outputs: dict[tuple[int, str], Tensor] = {}
        #: Zeros like the gradients that have not come.
        self._awaited: dict[tuple[int, str], Tensor] = {}

    def keep(self, layer: int, kind: str) -> Callable[[nn.Module, tuple, Tensor], Tensor | None]:
        """The forward hook of one capture point's module."""

        def hook(_module: nn.Module, _args: tuple, output: Tensor) -> Tensor | None:
            if self._skips():
                return None
            new = None
            if self.gradients and not output.requires_grad:
                # The first layer's output: everything below it is frozen. A copy, since a leaf cannot be changed in
                # place, as OLMo's clamp does.
                output = new = output.requires_grad_().clone()
            if self.recording:
                self._outputs[layer, kind] = output
            return new

        return hook

    def record(self, layer: int, kind: str, point: CapturePoint) -> Callable[[nn.Module, tuple, Any], None]:
        """The forward hook of the layer's attention. By then the model has made all changes of the output in place, so
        that numbers and gradients are those of what the cache gets."""

        def hook(_module: nn.Module, _args: tuple, _output: Any) -> None:
            if self._skips() or not self.recording:
                return
            output = self._outputs.pop((layer, kind))
            numbers = point.view(output.detach())[0].transpose(0, 1)
            self._pass_on(layer, kind, "x", numbers)
            if self.gradients:
                self._awaited[layer, kind] = numbers.new_zeros(()).expand_as(numbers)
                if not self._packed:
                    with _HOOKS:
                        output.register_hook(gradient_came)

        def gradient_came(gradient: Tensor) -> None:
            self._gradient_came(layer, kind, point.view(gradient.detach())[0])

        return hook

    def receiver(self, layers: Sequence[AttentionLayer]) -> Callable[[nn.Module, Tensor, Tensor], None]:
        """Takes gradients from `blocked_attention`: of rotated keys, and of values."""
        by_module = {layer.module: layer for layer in layers}

        def receive(module: nn.Module, keys: Tensor, values: Tensor) -> None:
            layer = by_module[module]
            rotation = layer.rotation
            # k' = s R k, with R a rotation: the gradient of k is s R^T g, and `undo` gives R^T g / s.
            before_rope = rotation.undo(keys[0].float(), 0) * rotation.scale**2
            self._gradient_came(layer.index, "k", before_rope.to(keys.dtype))
            self._gradient_came(layer.index, "v", values[0])

        return receive

    def _gradient_came(self, layer: int, kind: str, gradient: Tensor) -> None:
        """gradient: `[kv_heads, tokens, head_dim]`."""
        self._awaited.pop((layer, kind))
        self._pass_on(layer, kind, "g", gradient.transpose(0, 1))

    def _pass_on(self, layer: int, kind: str, quantity: str, numbers: Tensor) -> None:
        if not numbers.isfinite().all():
            raise KvqError(
                f"the {_DESCRIPTIONS[quantity]}{_DESCRIPTIONS[kind]} of layer {layer} are not all finite (NaN or "
                f"infinity): calibrate with --dtype float32, or check the model's weights"
            )
        self.on_capture(layer, kind, quantity, numbers)

    def fill_gradients(self) -> None:
        """Pass on zeros for the gradients that did not come."""
        for (layer, kind), zeros in self._awaited.items():
            self.on_capture(layer, kind, "g", zeros)

    def _skips(self) -> bool:
        """Whether a module runs for the sample of another thread."""
        return self.thread not in (None, threading.get_ident())

"""Run the model over calibration text and keep its pre-RoPE keys, its values, and the loss's gradients to both."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack, contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from kvq_cli.attention.capture_points import AttentionLayer, CapturePoint, decoder_of
from kvq_cli.calibration import blocked_attention
from kvq_cli.errors import KvqError

#: Receives what was captured: layer, "k" or "v", "x" (activations) or "g" (gradients), `[tokens, kv_heads, head_dim]`.
Sink = Callable[[int, str, str, Tensor], None]
_WORDS = {"k": "keys", "v": "values", "x": "", "g": "gradients of the "}


def capture(
    model: PreTrainedModel,
    sites: list[AttentionLayer],
    tokens: Tensor,
    sink: Sink,
    *,
    gradients: bool,
    shared: bool = False,
) -> None:
    """Pass one sample `[tokens]` through the model and give each layer's keys and values to `sink` as they come.

    gradients: also run the loss backward, the sum of the next-token cross entropies, and give d loss / d key and
    d loss / d value. The weights are frozen: nothing else gets a gradient. A model's own dtype is kept throughout.
    shared: other threads pass their samples through the same model on a CPU; of these nothing is taken.
    Raises KvqError naming the layer where numbers are not finite.
    """
    recorder = _Recorder(sink, gradients, threading.get_ident() if shared else None)
    ids = tokens[None].to(model.device)
    with ExitStack() as hooks, torch.set_grad_enabled(gradients):
        for site in sites:
            for kind, tap in (("k", site.key), ("v", site.value)):
                hooks.callback(tap.module.register_forward_hook(recorder.hook(site.index, kind, tap)).remove)
        if not gradients:
            decoder_of(model)(input_ids=ids, use_cache=False)
            return
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        loss = F.cross_entropy(logits, ids[0, 1:], reduction="sum")
        del logits
        recorder.recording = False  # checkpointed layers run again in the backward pass
        loss.backward()


@contextmanager
def blocked_attention_on_cpu(model: PreTrainedModel, sites: list[AttentionLayer]):
    """On a CPU, let plain causal attention be computed as matrix products, which take two thirds of the time."""
    decoder = decoder_of(model)
    before = decoder.config._attn_implementation
    plain = all(site.sliding_window is None for site in sites) and not getattr(decoder.config, "attention_dropout", 0)
    if model.device.type != "cpu" or before != "sdpa" or not plain:
        yield
        return
    blocked_attention.register()
    decoder.set_attn_implementation(blocked_attention.NAME)
    try:
        yield
    finally:
        decoder.set_attn_implementation(before)


@contextmanager
def gradient_checkpointing(model: PreTrainedModel, on: bool):
    """Recompute each layer's activations in the backward pass instead of keeping those of all layers."""
    if not on:
        yield
        return
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.23 has a new name for it, 5.17 has not
        model.gradient_checkpointing_enable({"use_reentrant": False})
        try:
            for layer in layers:  # transformers checkpoints in training only; dropout below stays off
                layer.training = True
            yield
        finally:
            for layer in layers:
                layer.training = False
            model.gradient_checkpointing_disable()


class _Recorder:
    """Makes the tapped outputs require gradients, and hands on what passes through them."""

    def __init__(self, sink: Sink, gradients: bool, thread: int | None) -> None:
        self.sink, self.gradients, self.thread, self.recording = sink, gradients, thread, True

    def hook(self, layer: int, kind: str, tap: CapturePoint) -> Callable:
        """The forward hook of one tap."""

        def give(what: str, output: Tensor) -> None:
            numbers = tap.view(output.detach())[0].transpose(0, 1)
            if not numbers.isfinite().all():
                raise KvqError(
                    f"the {_WORDS[what]}{_WORDS[kind]} of layer {layer} are not all finite (NaN or infinity): "
                    f"calibrate with --dtype float32, or check the model's weights"
                )
            self.sink(layer, kind, what, numbers)

        def after(_module, _args, output: Tensor) -> None:
            if self.thread not in (None, threading.get_ident()):
                return
            if self.gradients and not output.requires_grad:
                output.requires_grad_()  # the first layer's: below it everything is frozen
            if self.recording:
                give("x", output)
                if self.gradients:
                    output.register_hook(lambda gradient: give("g", gradient))

        return after

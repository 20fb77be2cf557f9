"""What a model's attention takes in while it reads a window: layer inputs, keys, values and queries, as they come.

Nothing is kept: a layer's numbers are given away and gone before the next layer runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvq_cli.attention.attach import attach
from kvq_cli.attention.capture_points import AttentionLayer, decoder_of, layer_input
from kvq_cli.calibration.capture import capture
from kvq_cli.codecs.base import Codec, Packed, Prompt, PromptCodec, State
from kvq_cli.methods.base import LayerPlan, Method, ModelShape, StreamPlan
from kvq_cli.methods.window import Window

#: Receives a layer's keys, values and queries, `[1, heads, tokens, head_dim]` each.
PromptSink = Callable[[int, Prompt], None]


def watch_inputs(
    model: PreTrainedModel, sites: list[AttentionLayer], tokens: Tensor, sink: Callable[[int, str, Tensor], None]
) -> None:
    """Pass one window `[tokens]` through the model and give `sink` each layer's input X ("x", after the layer's norm),
    keys before RoPE ("k") and values ("v"), `[tokens, channels]` each; all of a layer before those of the next."""
    with ExitStack() as hooks:
        for site in sites:

            def before(_module, args, kwargs, layer=site.index) -> None:
                sink(layer, "x", layer_input(args, kwargs)[0])

            hooks.callback(site.module.register_forward_pre_hook(before, with_kwargs=True).remove)
        capture(model, sites, tokens, lambda layer, kind, _, x: sink(layer, kind, x.flatten(1)), gradients=False)


@contextmanager
def watching_queries(model: PreTrainedModel, pre_rope: bool) -> Iterator[Callable[[Tensor, PromptSink], None]]:
    """Inside the block `watch(tokens, sink)` passes one window `[tokens]` through the model and gives each layer's
    keys, values and queries to `sink`; keys and queries before or after RoPE.

    They are what codecs see that are fit to a prompt: the model is under a method that stores nothing.
    """
    sinks: list[PromptSink] = []
    with attach(model, _Watching(pre_rope, sinks), backend="torch") as attached:

        @torch.no_grad()
        def watch(tokens: Tensor, sink: PromptSink) -> None:
            sinks[:] = [sink]
            decoder = decoder_of(model)
            decoder(input_ids=tokens[None].to(model.device), past_key_values=attached.new_cache(), use_cache=True)

        yield watch


class _Onlooker(PromptCodec):
    """Gives what it sees of a prompt to `sink` and keeps nothing."""

    nominal_bits = 16.0

    def __init__(self, sink: Callable[[Prompt], None]) -> None:
        self._sink = sink

    def fit(self, prompt: Prompt) -> State:
        self._sink(prompt)
        return {}

    def with_state(self, state: State, saliency: Tensor | None = None) -> Codec:
        return _Nothing()


class _Nothing(Codec):
    """Keeps nothing."""

    nominal_bits = 16.0

    def _encode(self, x: Tensor) -> Packed:
        return Packed(x.shape[2], {})

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError("nothing was kept")


@dataclass(frozen=True)
class _Watching(Method):
    name = "watching"
    paper = summary = caches = ""

    pre_rope: bool
    sinks: list[PromptSink]

    @property
    def nominal_bits(self) -> float:
        return 16.0

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, Tensor]) -> LayerPlan:
        keys = _Onlooker(lambda prompt: self.sinks[0](layer, prompt))
        source = "pre_rope" if self.pre_rope else "post_rope"
        return LayerPlan(StreamPlan(source, keys, Window()), StreamPlan("value", _Nothing(), Window()))

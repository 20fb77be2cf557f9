"""Hooks that pass each layer's inputs, keys, values and queries to a callback during a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvq_cli.attention.attach import attach
from kvq_cli.attention.capture_points import AttentionLayer, decoder_of, layer_input
from kvq_cli.cache_argument import cache_argument
from kvq_cli.calibration.capture import capture
from kvq_cli.codecs.base import Codec, Packed, Prompt, PromptCodec, State
from kvq_cli.codecs.layout import Layout, TensorLike
from kvq_cli.methods.base import LayerPlan, Method, ModelShape, StreamPlan
from kvq_cli.methods.window import Window

#: Receives a layer, counted among those with a cache, and its keys, values and queries, `[1, heads, tokens, head_dim]`
#: each.
PromptSink = Callable[[int, Prompt], None]


def watch_inputs(
    model: PreTrainedModel, sites: list[AttentionLayer], tokens: Tensor, sink: Callable[[int, str, Tensor], None]
) -> None:
    """Run a window `[tokens]` through the model and call `sink(layer, kind, numbers)` for each layer in turn.

    layer: counted among those with a cache.
    kind: "x" for the layer's input X after its norm, "k" for keys before RoPE, "v" for values. numbers:
    `[tokens, channels]`.
    """
    places = {site.index: place for place, site in enumerate(sites)}
    with ExitStack() as hooks:
        for place, site in enumerate(sites):

            def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], layer: int = place) -> None:
                sink(layer, "x", layer_input(args, kwargs)[0])

            hooks.callback(site.module.register_forward_pre_hook(before, with_kwargs=True).remove)
        capture(
            model, sites, tokens, lambda layer, kind, _, x: sink(places[layer], kind, x.flatten(1)), gradients=False
        )


@contextmanager
def query_hooks(model: PreTrainedModel, pre_rope: bool) -> Iterator[Callable[[Tensor, PromptSink], None]]:
    """Yields a function `run(tokens, sink)` that runs a window `[tokens]` through the model and calls `sink` with each
    layer's keys, values and queries; keys and queries before or after RoPE.

    The model is attached to a method whose codec reads the prompt, as SQuat's does, and stores nothing.
    """
    sinks: list[PromptSink] = []
    with attach(model, _PromptReader(pre_rope, sinks), backend="torch") as attached:

        @torch.no_grad()
        def run(tokens: Tensor, sink: PromptSink) -> None:
            sinks[:] = [sink]
            decoder = decoder_of(model)
            decoder(input_ids=tokens[None].to(model.device), **cache_argument(attached.new_cache()), use_cache=True)

        yield run


class _SinkCodec(PromptCodec):
    """Passes the prompt to `sink` and stores nothing."""

    nominal_bits = 16.0

    def __init__(self, sink: Callable[[Prompt], None]) -> None:
        self._sink = sink

    def layout(self, heads: int, dim: int, dtype: str, tokens: int) -> Layout:
        return Layout({})

    def fit(self, prompt: Prompt) -> State:
        self._sink(prompt)
        return {}

    def with_state(self, state: State, saliency: Tensor | None = None) -> Codec:
        return _EmptyCodec()


class _EmptyCodec(Codec):
    """Stores nothing."""

    nominal_bits = 16.0

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        return Layout({})

    def _encode(self, x: Tensor) -> Packed:
        return Packed(x.shape[2], {})

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        raise NotImplementedError("nothing was stored")


@dataclass(frozen=True)
class _PromptReader(Method):
    name = "prompt_reader"
    paper = summary = caches = ""

    pre_rope: bool
    sinks: list[PromptSink]

    @property
    def nominal_bits(self) -> float:
        return 16.0

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        place = shape.cached_layers.index(layer)
        keys = _SinkCodec(lambda prompt: self.sinks[0](place, prompt))
        source = "pre_rope" if self.pre_rope else "post_rope"
        return LayerPlan(StreamPlan(source, keys, Window()), StreamPlan("value", _EmptyCodec(), Window()))

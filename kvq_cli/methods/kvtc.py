"""KVTC (https://arxiv.org/abs/2511.01815), KV Cache Transform Coding: principal components of all layers and heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvq_cli.codecs.joined_layers import JoinedLayersCodec
from kvq_cli.codecs.layout import TensorLike
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.base import SOURCES, LayerPlan, Method, ModelShape, StreamPlan, of_stream, option
from kvq_cli.methods.joined_spec import JoinedSpec
from kvq_cli.methods.registry import register
from kvq_cli.methods.window import Window


@register
@dataclass(frozen=True)
class KVTC(Method):
    """Keys before RoPE of all layers and heads side by side, minus their mean, are transformed to principal components;
    values likewise, by a transform of their own. Components are integers of 2, 4 or 8 bits, or 16-bit numbers; groups
    of 16, 64, 256 or 1,024 adjacent ones share bits, and for each token a scale and a zero; the last are dropped. The
    groups are those of least squared error that `bits` allow, by dynamic programming.

    Codes are made when the last layer has a token, and held once; each layer decodes its own numbers of them at each
    read. A pass over more tokens than `recent` is computed that many at a time where its tokens see what was packed
    (evaluation); its own tokens are packed at its end where they do not (prompts of generation). DEFLATE, whose bytes
    depend on the numbers, is applied to saved caches alone: memory holds codes of a known size.

    Differences from the paper: 8-bit integers in place of FP8, no groups of one component, and an exact decomposition
    of at most 16,384 tokens' covariance in place of a randomized one.
    """

    name = "kvtc"
    paper = "https://arxiv.org/abs/2511.01815"
    summary = "principal components of all layers' keys, and values, bits by dynamic programming; pre-RoPE keys"
    caches = "K pre-RoPE, V, all layers at once"
    calibration_result = "principal components of all layers, groups and their bits"
    calibrates = True

    bits: float = option(2.0, "bits per number, scales included, at most", at_least=0.001, at_most=16.0)
    sinks: int = option(4, "first tokens kept in full precision (attention sinks)", at_least=0, runtime=True)
    recent: int = option(128, "newest tokens kept in full precision", at_least=1, runtime=True)
    buffer: int = option(16, "pack tokens in multiples of this many", at_least=1, runtime=True)

    deflate: bool = option(True, "compress the codes of saved caches by DEFLATE, which loses nothing", runtime=True)

    def keeps_local(self, shape: ModelShape) -> bool:
        if self.local == "16bit":
            raise UsageError(
                f"{self.name}: local=16bit takes layers out of the transform, which joins all layers: set local=packed"
            )
        return False

    def calibration(self, shape: ModelShape) -> JoinedSpec:
        return JoinedSpec(self.bits, self.sinks)

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        self.refuse_without_artifact(tensors)
        window, first = Window(self.sinks, self.recent, self.buffer), layer == shape.cached_layers[0]
        numbers = self.calibration(shape).numbers(shape)

        def stream(kind: str) -> StreamPlan:
            own = of_stream(tensors, kind)
            for name in ("groups", "mean", "spread", "basis"):
                if name not in own:
                    raise KvqError(f"the artifact has no tensor layers.{layer}.{kind}.{name}; calibrate again")
            codec = JoinedLayersCodec(own, numbers, shape.dtype, holds=first, deflates=self.deflate)
            return StreamPlan(SOURCES[kind], codec, window)

        return LayerPlan(stream("k"), stream("v"))

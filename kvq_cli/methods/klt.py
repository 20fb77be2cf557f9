"""KLT: codes for the components of a Karhunen-Loeve transform in the metric of the loss (docs/METHOD.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvq_cli.codecs.layout import TensorLike
from kvq_cli.codecs.transform import TransformCodec
from kvq_cli.errors import KvqError
from kvq_cli.methods.base import SOURCES, LayerPlan, Method, ModelShape, StreamPlan, of_stream, option
from kvq_cli.methods.registry import register
from kvq_cli.methods.specs import TransformSpec
from kvq_cli.methods.window import Window


@register
@dataclass(frozen=True)
class KLT(Method):
    """Keys before RoPE and values, transformed to uncorrelated components in which every error costs the same loss;
    components are integers of 1 to 8 bits relative to a gain of the token and head, and the least are dropped.

    The transform diagonalizes the covariance of G^(1/2) (x - mean), where G = E[g g^T] is the Fisher matrix of the
    loss's gradients g. Bits are given out to fields of 8 components of all layers' keys and values so that the loss is
    least.
    """

    name = "klt"
    paper = "docs/METHOD.md"
    summary = "integers of 0 to 8 bits for Karhunen-Loeve components in the Fisher metric, bits by loss; pre-RoPE keys"
    caches = "K pre-RoPE, V"
    calibration_result = "transforms, bits and steps of each component"
    calibrates = True

    bits: float = option(2.0, "bits per number, gains included, over the model", at_least=0.001, at_most=8.0)
    join_keys: bool = option(False, "one transform for the keys of all kv heads of a layer; off: one per head")
    join_values: bool = option(False, "one transform for the values of all kv heads of a layer; off: one per head")
    metric: str = option(
        "full",
        "errors that the transform minimizes: Fisher matrix, its diagonal, or plain",
        choices=("full", "diagonal", "none"),
    )
    allocate: str = option("model", "allocate bits over the whole model, or per stream", choices=("model", "stream"))
    fisher: bool = option(True, "weight errors by squared gradients")
    sinks: int = option(8, "first tokens kept in full precision (attention sinks)", at_least=0, runtime=True)
    recent: int = option(0, "newest tokens kept in full precision", at_least=0, runtime=True)
    buffer: int = option(16, "pack tokens in multiples of this many, a multiple of 16", at_least=16, runtime=True)

    def calibration(self, shape: ModelShape) -> TransformSpec:
        return TransformSpec(
            bits=self.bits,
            join_keys=self.join_keys,
            join_values=self.join_values,
            skip=self.sinks,
            fisher=self.fisher,
            metric=self.metric,
            allocate=self.allocate,
            near=self.recent + self.buffer // 2,
        )

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        keys, values = (self.stream_plan(kind, layer, shape, tensors) for kind in "kv")
        return LayerPlan(keys, values)

    def stream_plan(self, kind: str, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> StreamPlan:
        self.refuse_without_artifact(tensors)
        codec = transform_codec(of_stream(tensors, kind), shape, f"layers.{layer}.{kind}", values=kind == "v")
        return StreamPlan(SOURCES[kind], codec, Window(self.sinks, self.recent, self.buffer))


def transform_codec(
    tensors: Mapping[str, TensorLike], shape: ModelShape, where: str, *, values: bool
) -> TransformCodec:
    """The codec of one stream. tensors: see `transform_layout`. where: their prefix in the artifact, for messages.
    Raises KvqError naming a tensor that is missing."""
    for name in ("widths", "mean", "std", "analysis", "synthesis", "center"):
        if name not in tensors:
            raise KvqError(f"the artifact has no tensor {where}.{name}; calibrate again with these options")
    return TransformCodec(shape.kv_heads, tensors, values)

"""KLT: codes for the components of a Karhunen-Loeve transform in the metric of the loss (docs/METHOD.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvq_cli.codecs.layout import TensorLike
from kvq_cli.codecs.transform import same_widths, transform_codec
from kvq_cli.errors import KvqError
from kvq_cli.methods.base import SOURCES, LayerPlan, Method, ModelShape, StreamPlan, of_stream, option
from kvq_cli.methods.registry import register
from kvq_cli.methods.transform_specs import TransformSpec
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
    recent: int = option(32, "newest tokens kept in full precision", at_least=0, runtime=True)
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
        streams = [of_stream(tensors, kind) for kind in "kv"]
        for kind, stream in zip("kv", streams, strict=True):
            self._check(stream, f"layers.{layer}.{kind}")
        # A kernel is launched for the heads with the same widths of keys and of values.
        by_head = all(stream["mean"].shape[0] == shape.kv_heads for stream in streams)
        lists = same_widths(*streams) if by_head else None
        keys, values = (self._stream(kind, shape, stream, lists) for kind, stream in zip("kv", streams, strict=True))
        return LayerPlan(keys, values)

    def stream_plan(self, kind: str, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> StreamPlan:
        own = of_stream(tensors, kind)
        self._check(own, f"layers.{layer}.{kind}")
        return self._stream(kind, shape, own, None)

    def _stream(
        self, kind: str, shape: ModelShape, tensors: Mapping[str, TensorLike], lists: list[list[int]] | None
    ) -> StreamPlan:
        codec = transform_codec(shape.kv_heads, tensors, kind == "v", lists)
        return StreamPlan(SOURCES[kind], codec, Window(self.sinks, self.recent, self.buffer))

    def _check(self, tensors: Mapping[str, TensorLike], where: str) -> None:
        """Raise KvqError naming a tensor of a stream that is missing. where: its prefix in the artifact."""
        self.refuse_without_artifact(tensors)
        for name in ("widths", "mean", "std", "analysis", "synthesis", "center"):
            if name not in tensors:
                raise KvqError(f"the artifact has no tensor {where}.{name}; calibrate again with these options")

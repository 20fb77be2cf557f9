"""OSCAR (https://arxiv.org/abs/2605.17757), Offline Spectral Covariance-Aware Rotation: rotated, clipped, rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvq_cli.codecs.clipped import ClippedCodec
from kvq_cli.codecs.hadamard import factors
from kvq_cli.codecs.layout import TensorLike
from kvq_cli.codecs.rotated import MatrixRotation, RotatedCodec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.methods.base import LayerPlan, Method, ModelShape, StreamPlan, of_stream, option
from kvq_cli.methods.registry import register
from kvq_cli.methods.rotation_spec import RotationSpec
from kvq_cli.methods.window import Window


@register
@dataclass(frozen=True)
class Oscar(Method):
    """Keys after RoPE and values, rotated by a matrix per layer that all heads share, are clipped per token and head
    and quantized in groups of `group` channels. Another method than `oscar-omni`.

    The rotation is U H P. For keys, U are eigenvectors of the queries' second moments; for values, of those of values
    weighted by k^T C k, with C the queries' second moments of the kv head. H is a Hadamard matrix; P puts channels in
    bit-reversed order of their eigenvalues, so that groups have directions of all sizes. Clipping: to number floor(clip
    * head_dim) of the token's magnitudes in ascending order.

    As in the public code (https://github.com/FutureMLS-Lab/OSCAR), rotations come from text that is read without
    gradients. Differences: scales and zero-points have 16 bits; an eigenvector's sign is fixed; head_dim may also be 12
    or 20 times a power of two; its Lloyd-Max levels (SGLANG_LLOYD_MAX) are left out.
    """

    name = "oscar"
    paper = "https://arxiv.org/abs/2605.17757"
    summary = "per layer a rotation by what attention reads keys and values with, clipping, uniform codes per token"
    caches = "K post-RoPE, V"
    calibration_result = "rotations from queries and weighted values"
    calibrates = True

    bits: int = option(2, "bits per number", choices=(1, 2, 3, 4, 8), why="others cannot be packed", runtime=True)
    group: int = option(128, "channels that share a scale and a zero-point, at most head_dim", at_least=8, runtime=True)
    key_clip: float = option(
        0.96, "share of a key's magnitudes that are not clipped; 1: all", at_least=0.5, at_most=1.0, runtime=True
    )
    value_clip: float = option(0.92, "the same of a value's", at_least=0.5, at_most=1.0, runtime=True)
    sinks: int = option(64, "first tokens kept in full precision (attention sinks)", at_least=0, runtime=True)
    recent: int = option(256, "newest tokens kept in full precision", at_least=0, runtime=True)
    buffer: int = option(1, "pack tokens in multiples of this many", at_least=1, runtime=True)

    def calibration(self, shape: ModelShape) -> RotationSpec:
        factors(shape.head_dim)
        return RotationSpec()

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        self.refuse_without_artifact(tensors)
        window = Window(self.sinks, self.recent, self.buffer)

        def stream(source: str, kind: str, clip: float) -> StreamPlan:
            own = of_stream(tensors, kind)
            group = min(self.group, shape.head_dim)
            codec = ClippedCodec(UniformCodec(self.bits, "token", group, shape.head_dim, shape.dtype), clip)
            return StreamPlan(source, RotatedCodec(codec, MatrixRotation(own["rotation"], own["spread"])), window)

        return LayerPlan(stream("post_rope", "k", self.key_clip), stream("value", "v", self.value_clip))

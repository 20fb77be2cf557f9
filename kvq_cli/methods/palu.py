"""PALU (https://arxiv.org/abs/2407.21118): low-rank latents of keys and values per group of heads, quantized."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvq_cli.codecs.base import Codec
from kvq_cli.codecs.hadamard import factors
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.codecs.layout import TensorLike
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan, Method, ModelShape, StreamPlan, option
from kvq_cli.methods.registry import register
from kvq_cli.methods.specs import LowRankSpec
from kvq_cli.methods.window import Window
from kvq_cli.methods.xquant import BITS, EXACT, factor

#: Latents of a group are a multiple of this, for groups of at least twice as many channels.
_STEP = 32


@register
@dataclass(frozen=True)
class Palu(Method):
    """Caches latents X A of the layer input instead of keys and values: W ~ A B for each group of `heads` kv heads
    (G-LRD), with `share` as many latents as channels. B turns them into keys before RoPE and values.

    A and B are the singular value decomposition of W_k and W_v, whitened by the layer inputs of the calibration text,
    with the singular values split evenly between both. A Hadamard matrix is multiplied into both, so that no latent
    has much larger numbers than others. Latents are quantized per token, one scale and zero-point per group of heads.

    Differences to the public code (https://github.com/shadowpa0327/Palu): all layers, keys and values have the same
    rank (its `uniform` search; its default distributes ranks by Fisher information); zero-points are not rounded to
    whole steps; the bias of a projection is added after decoding, as there.
    """

    name = "palu"
    paper = "https://arxiv.org/abs/2407.21118"
    summary = "low-rank latents of keys and values per group of heads, Hadamard-rotated and quantized per token"
    caches = "latents X A_k, X A_v"
    calibration_result = "whitened SVD of W_k, W_v per group of heads"
    calibrates = True

    bits: int = option(
        4, "bits per latent; 16: not quantized", choices=BITS, why="others cannot be packed", runtime=True
    )
    share: float = option(0.5, "latents per channel of keys and values (the paper: 0.5)", at_least=0.01, at_most=1.0)
    heads: int = option(
        4,
        "maximum number of kv heads per factorized group; the largest divisor of the model's kv heads is used",
        at_least=1,
    )
    whiten: bool = option(True, "minimize the error of keys and values on text; off: of the weights")
    hadamard: bool = option(True, "rotate latents by a Hadamard matrix")
    sinks: int = option(0, "first tokens kept in full precision (attention sinks)", at_least=0, runtime=True)
    recent: int = option(0, "newest tokens kept in full precision", at_least=0, runtime=True)
    buffer: int = option(1, "pack tokens in multiples of this many", at_least=1, runtime=True)

    @property
    def nominal_bits(self) -> float:
        """Bits of the latents' codes per number of keys and values, before the number of latents is rounded."""
        return self.bits * self.share

    def calibration(self, shape: ModelShape) -> LowRankSpec:
        heads = max(n for n in range(1, min(self.heads, shape.kv_heads) + 1) if shape.kv_heads % n == 0)
        latents = self._latents(heads * shape.head_dim, shape)
        return LowRankSpec((("k", "v"),) * shape.layers, heads, latents, self.whiten, self.hadamard)

    def _latents(self, width: int, shape: ModelShape) -> int:
        """Latents of a group of `width` channels."""
        step = _STEP if width >= 2 * _STEP else 1
        latents = min(max(1, round(self.share * width / step)) * step, width, shape.hidden_size)
        if self.hadamard:
            try:
                factors(latents)
            except UsageError as error:
                raise UsageError(f"palu: share={self.share:g} of {width} channels: {error}; or hadamard=off") from error
        return latents

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        self.refuse_without_artifact(tensors)
        spec = self.calibration(shape)

        def stream(kind: str) -> StreamPlan:
            down, up = (factor(tensors, f"{kind}.{side}", layer, shape) for side in ("down", "up"))
            codec: Codec = IdentityCodec()
            if self.bits != EXACT:
                codec = UniformCodec(self.bits, "token", spec.latents, down.shape[1], shape.dtype)
            return StreamPlan("input", codec, Window(self.sinks, self.recent, self.buffer), down, up)

        return LayerPlan(stream("k"), stream("v"))

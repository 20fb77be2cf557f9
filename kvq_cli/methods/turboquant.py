"""TurboQuant (https://arxiv.org/abs/2504.19874), as vLLM serves it: a norm and Lloyd-Max codes of the rotated token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvq_cli.codecs.base import Codec
from kvq_cli.codecs.layout import TensorLike
from kvq_cli.codecs.lloyd_max import BITS, LloydMaxCodec
from kvq_cli.codecs.rotated import HadamardRotation, RotatedCodec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan, Method, ModelShape, StreamPlan, option, uncompressed
from kvq_cli.methods.registry import register
from kvq_cli.methods.window import Window


@register
@dataclass(frozen=True)
class TurboQuant(Method):
    """Keys after RoPE: the norm of a token's head in 16 bits, and Lloyd-Max codes of its Hadamard-rotated direction.
    Values: uniform codes, head_dim numbers to a scale and a zero-point; or as keys (`values=lloyd_max`, the paper).

    Defaults are those of vLLM's presets `turboquant_4bit_nc` and `turboquant_3bit_nc`; `turboquant_k3v4_nc` is `bits=3`
    with `value_bits=4`. As there, the paper's second stage for keys, one bit of a random projection of the error (QJL),
    is left out.

    Differences to vLLM: all layers are compressed unless `skip_layers=2` keeps the first and last two, as vLLM does;
    there are no FP8 keys (`turboquant_k8v4`), but codes of 1 and 2 bits; levels are exact, not integrated with 200
    trapezoids; head_dim may also be 12 or 20 times a power of two. Differences to the paper: a Hadamard matrix (with
    random signs: `flip=on`) replaces the random rotation, the normal distribution the exact Beta distribution, and no
    channels have more bits than others.
    """

    name = "turboquant"
    paper = "https://arxiv.org/abs/2504.19874"
    summary = "one norm per token and head, Lloyd-Max codes of the Hadamard-rotated key, uniform codes of the value"
    caches = "K post-RoPE, V"

    bits: int = option(2, "bits per number", choices=BITS, why="Lloyd-Max codes have 1 to 4 bits")
    value_bits: int | None = option(
        None, "bits per number of values; none: as keys", choices=(None, *BITS), why="Lloyd-Max codes have 1 to 4 bits"
    )
    values: str = option(
        "uniform",
        "quantizer of the values: uniform (as in vLLM) or lloyd_max (as for keys)",
        choices=("uniform", "lloyd_max"),
    )
    correct_norm: bool = option(True, "rescale decoded keys to their own norm (vLLM's _nc)")
    flip: bool = option(False, "flip random signs of channels before the Hadamard transform")
    skip_layers: int = option(0, "first and last layers that stay uncompressed (vLLM: 2)", at_least=0)
    sinks: int = option(0, "first tokens kept in full precision (attention sinks)", at_least=0)
    recent: int = option(0, "newest tokens kept in full precision", at_least=0)
    buffer: int = option(1, "pack tokens in multiples of this many", at_least=1)

    @property
    def nominal_bits(self) -> float:
        return (self.bits + (self.value_bits or self.bits)) / 2

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        layers = shape.cached_layers
        if self.skip_layers and 2 * self.skip_layers >= len(layers):
            raise UsageError(
                f"turboquant: skip_layers={self.skip_layers} leaves none of {len(layers)} layers to compress"
            )
        if layer not in layers[self.skip_layers : len(layers) - self.skip_layers]:
            return uncompressed()
        bits, window = self.value_bits or self.bits, Window(self.sinks, self.recent, self.buffer)
        values = self._rotated(bits, shape)
        if self.values == "uniform":
            values = UniformCodec(bits, "token", shape.head_dim, shape.head_dim, shape.dtype)
        return LayerPlan(
            keys=StreamPlan("post_rope", self._rotated(self.bits, shape), window),
            values=StreamPlan("value", values, window),
        )

    def _rotated(self, bits: int, shape: ModelShape) -> Codec:
        rotation = HadamardRotation(shape.head_dim, self.flip)
        return RotatedCodec(LloydMaxCodec(bits, shape.head_dim, self.correct_norm), rotation)

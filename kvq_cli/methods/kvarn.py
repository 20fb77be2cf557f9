"""KVarN (https://arxiv.org/abs/2606.03458): Hadamard-rotated tiles, tokens and channels balanced, then rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvq_cli.codecs.balanced import BalancedCodec
from kvq_cli.codecs.layout import TensorLike
from kvq_cli.codecs.rotated import HadamardRotation, RotatedCodec
from kvq_cli.codecs.uniform import Axis
from kvq_cli.methods.base import LayerPlan, Method, ModelShape, StreamPlan, option
from kvq_cli.methods.registry import register
from kvq_cli.methods.window import Window


@register
@dataclass(frozen=True)
class KVarN(Method):
    """Tiles of `group` tokens of a head, rotated by a Hadamard matrix along head_dim: the standard deviations of all
    tokens and of all channels are made equal by scales of both, found by alternating division (16 times), before the
    tile is quantized. Keys: range per channel, another scale per token; values: range per token, another scale per
    channel. No calibration.

    The first `sinks` tokens and those of an incomplete tile stay in full precision. vLLM's preset `kvarn_k4v2_g128` is
    `bits=4:value_bits=2`, `kvarn_k4v4_g128` is `bits=4`; the paper's results are of 2 bits. As in the authors' public
    code (https://github.com/huawei-csl/KVarN), whose serving path has 8 iterations. head_dim must be a power of two, or
    12 or 20 times one.
    """

    name = "kvarn"
    paper = "https://arxiv.org/abs/2606.03458"
    summary = "Hadamard-rotated tiles whose tokens and channels are balanced; keys per channel, values per token"
    caches = "K post-RoPE, V"

    bits: int = option(2, "bits per number", choices=(1, 2, 3, 4, 8), why="others cannot be packed")
    value_bits: int | None = option(
        None,
        "bits per number of values; none: as keys",
        choices=(None, 1, 2, 3, 4, 8),
        why="others cannot be packed",
    )
    group: int = option(128, "tokens of a tile", at_least=8)
    iterations: int = option(16, "times that columns and rows of a tile are balanced", at_least=0, at_most=64)
    sinks: int = option(128, "first tokens kept in full precision (attention sinks)", at_least=0)
    recent: int = option(0, "newest tokens kept in full precision", at_least=0)

    @property
    def nominal_bits(self) -> float:
        return (self.bits + (self.value_bits or self.bits)) / 2

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        window = Window(self.sinks, self.recent, self.group)

        def stream(source: str, bits: int, axis: Axis) -> StreamPlan:
            codec = BalancedCodec(bits, axis, self.group, shape.head_dim, self.iterations)
            return StreamPlan(source, RotatedCodec(codec, HadamardRotation(shape.head_dim)), window)

        return LayerPlan(
            keys=stream("post_rope", self.bits, "channel"),
            values=stream("value", self.value_bits or self.bits, "token"),
        )

"""GEAR (https://arxiv.org/abs/2403.05527): KIVI, its error approximated in low rank, and outliers kept exact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvq_cli.codecs.gear import GearCodec
from kvq_cli.codecs.layout import TensorLike
from kvq_cli.codecs.uniform import Axis, UniformCodec
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan, Method, ModelShape, StreamPlan, option
from kvq_cli.methods.registry import register
from kvq_cli.methods.window import Window


@register
@dataclass(frozen=True)
class Gear(Method):
    """X ~ D + L + S, per head: KIVI's groups D, a low-rank approximation L of their error, outliers S.

    The first pass over a sequence is the prompt: its packed tokens are one chunk with one pair of factors. Later keys
    and values are packed in chunks of `residual` tokens. Scales divide by 2^bits - 1.
    """

    name = "gear"
    paper = "https://arxiv.org/abs/2403.05527"
    summary = "kivi, with a low-rank approximation of its error and with outliers in 16 bits"
    caches = "K post-RoPE, V"

    bits: int = option(2, "bits per number", choices=(1, 2, 3, 4, 8), why="others cannot be packed")
    group: int = option(32, "numbers that share a scale and a zero-point", at_least=2)
    residual: int = option(128, "tokens that are packed together; a multiple of the group", at_least=1)
    outliers: float = option(0.02, "fraction of numbers kept in 16 bits", at_least=0.0, at_most=1.0)
    rank: int = option(4, "rank of the low-rank error approximation of the prompt; 0: none", at_least=0)
    chunk_rank: int = option(2, "rank for each `residual` tokens after the prompt; 0: none", at_least=0)
    loops: int = option(3, "power iterations", at_least=1)
    sinks: int = option(0, "first tokens kept in full precision (attention sinks)", at_least=0)
    recent: int = option(0, "newest tokens kept in full precision", at_least=0)
    seed: int = option(0, "seed of the power iterations")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.residual % self.group:
            raise UsageError(f"gear: residual={self.residual} is not a multiple of group={self.group}")

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        def stream(source: str, axis: Axis) -> StreamPlan:
            base = UniformCodec(self.bits, axis, self.group, shape.head_dim, shape.dtype)
            codec = GearCodec(base, self.residual, self.outliers, self.rank, self.chunk_rank, self.loops, self.seed)
            return StreamPlan(source, codec, Window(self.sinks, self.recent, self.residual))

        return LayerPlan(keys=stream("post_rope", "channel"), values=stream("value", "token"))

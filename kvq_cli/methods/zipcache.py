"""ZipCache (https://arxiv.org/abs/2405.14256): more bits for the tokens that receive more attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvq_cli.codecs.layout import TensorLike
from kvq_cli.codecs.salient import SalientCodec, Side
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan, Method, ModelShape, StreamPlan, option
from kvq_cli.methods.registry import register
from kvq_cli.methods.window import Window


@register
@dataclass(frozen=True)
class ZipCache(Method):
    """Of each kv head the share `ratio` of the tokens with the highest normalized attention has `high` bits.

    Keys: per channel. Values: per token, after division by sqrt(max |V|) of the channel. The first pass over a sequence
    is the prompt, with one scale per channel and kind of token, and probes among its queries: the newest 5% and a
    random 5%, whose attention to a token is divided by how many of them see it. Later tokens are packed
    `residual` at a time; in each chunk the same share has `high` bits, by the attention of the query that completes it,
    as in the authors' code. That attention is computed within the chunk, not over the whole cache.
    """

    name = "zipcache"
    paper = "https://arxiv.org/abs/2405.14256"
    summary = "uniform quantization, with more bits for the tokens that receive more attention"
    caches = "K post-RoPE, V"

    bits: int = option(2, "bits per number of non-salient tokens", choices=(1, 2, 3, 4), why="salient ones have more")
    high: int | None = option(
        None, "bits per number of salient tokens; none: the next of 2, 4, 8", choices=(None, 1, 2, 3, 4, 8)
    )
    ratio: float = option(0.4, "fraction of salient tokens", at_least=0.0, at_most=1.0)
    residual: int = option(100, "tokens after the prompt that are packed together", at_least=1)
    sinks: int = option(0, "first tokens kept in full precision (attention sinks)", at_least=0)
    recent: int = option(0, "newest tokens kept in full precision", at_least=0)
    seed: int = option(0, "seed of the random probes")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.salient_bits < self.bits:
            raise UsageError(f"zipcache: high={self.high} is less than the bits={self.bits} of the other tokens")

    @property
    def salient_bits(self) -> int:
        return self.high or next(bits for bits in (2, 4, 8) if bits > self.bits)

    @property
    def nominal_bits(self) -> float:
        return self.bits + self.ratio * (self.salient_bits - self.bits)

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        def stream(source: str, side: Side) -> StreamPlan:
            codec = SalientCodec(
                side, self.bits, self.salient_bits, self.ratio, self.residual, shape.head_dim, shape.dtype, self.seed
            )
            return StreamPlan(source, codec, Window(self.sinks, self.recent, self.residual))

        return LayerPlan(keys=stream("post_rope", "keys"), values=stream("value", "values"))

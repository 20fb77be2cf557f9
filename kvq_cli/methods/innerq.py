"""InnerQ (https://arxiv.org/abs/2602.23200): groups along the inner dimension of both products of attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from kvq_cli.codecs.base import AnyCodec, Codec
from kvq_cli.codecs.layout import TensorLike
from kvq_cli.codecs.normalized import NormalizedCodec
from kvq_cli.codecs.phased import PhasedCodec
from kvq_cli.codecs.signed import WORDS, Hybrid, Sign, SignedCodec, zero_type
from kvq_cli.codecs.uniform import Axis, UniformCodec
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import LayerPlan, Method, ModelShape, StreamPlan, option
from kvq_cli.methods.registry import register
from kvq_cli.methods.window import Window

#: mode -> `hybrid` of the `SignedCodec` that encodes the prompt, and of the one that encodes later tokens.
HYBRIDS: dict[str, tuple[Hybrid, Hybrid]] = {
    "hybrid_prefill": ("always", "symmetric"),
    "hybrid": ("always", "always"),
}


@register
@dataclass(frozen=True)
class InnerQ(Method):
    """Keys: groups of `group` channels of a token, after normalization (4.3). Values: groups of `group` tokens of a
    channel. Symmetric (Eq. 13), asymmetric (Eq. 10-12), or per group the one with the lower squared error (4.1.2).

    A word per group holds its sign bits or its zero-point; the sign of the 16-bit scale tells which: 2 bits in groups
    of 32 are 2 + 1 + 0.5 bits per number (the paper keeps the choice apart: 1/32 more). The windows (4.2) hold in
    decode too: the newest `recent` keys and values stay in full precision, and values of incomplete groups. Keys are
    packed token by token, unless `buffer` makes them wait as values do.
    """

    name = "innerq"
    paper = "https://arxiv.org/abs/2602.23200"
    summary = "uniform, symmetric or asymmetric per group: keys in groups of channels, values in groups of tokens"
    caches = "K post-RoPE, V"

    bits: int = option(
        2, "bits per number, the sign not counted", choices=(1, 2, 3, 4, 8), why="others cannot be packed"
    )
    mode: str = option("hybrid", "how groups are quantized", choices=("symmetric", *HYBRIDS, "asymmetric"))
    group: int = option(32, "numbers that share a scale", choices=tuple(WORDS), why="their sign bits fill one word")
    sinks: int = option(32, "first tokens kept in full precision (attention sinks)", at_least=0)
    recent: int = option(96, "newest tokens kept in full precision", at_least=0)
    buffer: int | None = option(None, "pack tokens in multiples of this many; none: as the paper does", at_least=1)
    norm: bool = option(True, "divide key channels by the square root of their maximum in the prompt")
    sign: str = option("extra", "sign bits: in addition to the bits, or one of them", choices=("extra", "inside"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sign == "inside" and self.mode != "asymmetric" and self.bits == 1:
            raise UsageError(
                f"innerq: sign=inside leaves no bit for the magnitude at bits=1 in mode={self.mode}; "
                "use sign=extra, mode=asymmetric or 2 bits"
            )
        if self.sign == "inside" and self.mode in ("hybrid", "hybrid_prefill") and self.bits == 8:
            raise UsageError(
                f"innerq: sign=inside leaves 7 bits beside the sign at bits=8 in mode={self.mode}, which cannot be "
                "packed; use sign=extra, mode=symmetric or 4 bits"
            )

    def plan(self, layer: int, shape: ModelShape, tensors: Mapping[str, TensorLike]) -> LayerPlan:
        if shape.head_dim % self.group:
            fitting = " or ".join(str(group) for group in WORDS if shape.head_dim % group == 0)
            says = f"use {fitting}" if fitting else "none of its groups does: use another method"
            raise UsageError(f"innerq: group={self.group} does not divide head_dim={shape.head_dim}; {says}")
        prompt, later = self._codecs("token", shape)
        keys = NormalizedCodec(prompt, later) if self.norm else _phased(prompt, later)
        values = _phased(*self._codecs("channel", shape))
        key_window, value_window = (
            Window(self.sinks, self.recent, math.lcm(flush, self.buffer or 1)) for flush in (1, self.group)
        )
        return LayerPlan(
            keys=StreamPlan("post_rope", keys, key_window), values=StreamPlan("value", values, value_window)
        )

    def _codecs(self, axis: Axis, shape: ModelShape) -> tuple[Codec, Codec]:
        """(codec of the prompt, codec of later tokens): different only in mode "hybrid_prefill"."""
        layout = (axis, self.group, shape.head_dim, shape.dtype)
        if self.mode == "asymmetric":
            # The zero-point is as wide as the word that sign bits would take, as in the paper.
            zero = zero_type(self.group, shape.dtype) if self.sign == "extra" else None
            codec = UniformCodec(self.bits, *layout, zero)
            return codec, codec
        if self.mode == "symmetric":
            symmetric = SignedCodec(self.bits, *layout, cast(Sign, self.sign))
            return symmetric, symmetric
        # With the sign inside, both kinds of groups have b - 1 bits beside the word of sign bits or zero-point.
        bits = self.bits - 1 if self.sign == "inside" else self.bits
        prompt, later = (SignedCodec(bits, *layout, hybrid=hybrid) for hybrid in HYBRIDS[self.mode])
        return prompt, prompt if later.hybrid == prompt.hybrid else later


def _phased(prompt: Codec, later: Codec) -> AnyCodec:
    return prompt if later is prompt else PhasedCodec(prompt, later)

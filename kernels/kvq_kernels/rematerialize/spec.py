"""Compile-time description of a launch: which tokens a kernel reads, and how they are stored (`Source`)."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from kvq_kernels.decode_attention.parts import Uniform
from kvq_kernels.planar import high_words, low_bits, low_words
from kvq_kernels.rematerialize.parts import Latents


@dataclass(frozen=True)
class Source:
    """Tokens that one launch reads: "exact" (a row's sinks, then its recent tokens), or its packed tokens, stored
    "dense" or "uniform".

    width: channels of a line. first: channel 0 is stored separately, before these. words, fields: a line has `words`
    elements of `fields` numbers, number f of element w is channel f * words + w; 3-bit codes: their low two bits, the
    high bits are in `high` words after these.
    """

    kind: str
    width: int
    sinks: int
    words: int
    fields: int = 1
    bits: int = 16
    high: int = 0
    axis: str = "token"
    group: int = 1
    first: bool = False

    @classmethod
    def exact(cls, side: Latents) -> Source:
        """Tokens that are not packed."""
        return cls("exact", side.rank, _sinks(side), side.rank)

    @classmethod
    def packed(cls, side: Latents) -> Source:
        """Packed tokens."""
        packed, width = side.held.packed, side.rank - (side.first is not None)
        if not isinstance(packed, Uniform):
            return cls("dense", width, _sinks(side), width, first=side.first is not None)
        low = low_bits(packed.bits)
        high = high_words(packed.bits, width)
        words = low_words(packed.bits, width)
        fields, first = 32 // low, side.first is not None
        return cls("uniform", width, _sinks(side), words, fields, packed.bits, high, packed.axis, packed.group, first)

    @property
    def row(self) -> int:
        """Elements of a line."""
        return self.words + self.high

    @property
    def key(self) -> str:
        """Part of the shape class in the tuning table."""
        return f"uniform/{self.bits}bit" if self.kind == "uniform" else self.kind


def _sinks(side: Latents) -> int:
    return 0 if side.held.sinks is None else side.held.sinks.shape[2]


@triton.constexpr_function
def in_one_group(source: Source, elements: int) -> bool:
    """Whether `elements` neighbouring words of a field are always in one group of channels (axis "token")."""
    return source.axis == "token" and source.group % elements == 0 and source.words % elements == 0


@triton.constexpr_function
def groups(source: Source) -> int:
    """Groups of a token's channels (axis "token")."""
    return source.width // source.group

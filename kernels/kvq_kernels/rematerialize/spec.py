"""What is fixed when a kernel is compiled: where it finds tokens, and how they are kept there."""

from __future__ import annotations

from dataclasses import dataclass

import triton

from kvq_kernels.decode_attention.parts import Uniform
from kvq_kernels.planar import high_words, low_bits, low_words
from kvq_kernels.rematerialize.parts import Latents


@dataclass(frozen=True)
class Source:
    """kind: "exact" (a row's sinks, then its recent tokens), "dense" or "uniform" (its packed tokens).

    width: channels that are read so. first: channel 0 is kept apart, before these. words, fields: a token's line holds
    `words` elements with `fields` numbers each, number f of element w being channel f * words + w; of 3-bit codes these
    are the low two bits, with the high bits in `high` words after them.
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
        """The tokens that are not packed."""
        return cls("exact", side.rank, _sinks(side), side.rank)

    @classmethod
    def packed(cls, side: Latents) -> Source:
        packed, width = side.held.packed, side.rank - (side.first is not None)
        if not isinstance(packed, Uniform):
            return cls("dense", width, _sinks(side), width, first=side.first is not None)
        low = low_bits(packed.bits)
        high = high_words(packed.bits, width)
        words = low_words(packed.bits, width)
        own = (words, 32 // low, packed.bits, high, packed.axis, packed.group, side.first is not None)
        return cls("uniform", width, _sinks(side), *own)

    @property
    def row(self) -> int:
        """Elements of a token."""
        return self.words + self.high

    @property
    def key(self) -> str:
        """Its shape class in the table of configurations."""
        return f"uniform/{self.bits}bit" if self.kind == "uniform" else self.kind


def _sinks(side: Latents) -> int:
    return 0 if side.held.sinks is None else side.held.sinks.shape[2]


@triton.constexpr_function
def in_one_group(source, elements):
    """Does a run of `elements` neighbouring words of one field never cross a group of channels (axis "token")?"""
    return source.axis == "token" and source.group % elements == 0 and source.words % elements == 0


@triton.constexpr_function
def groups(source):
    """Groups of a token's channels (axis "token")."""
    return source.width // source.group

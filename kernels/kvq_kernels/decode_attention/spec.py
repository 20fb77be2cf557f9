"""What is fixed when a kernel is compiled: how each side is stored, and the sizes of tiles."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton

from kvq_kernels.decode_attention.parts import Codebook, Dense, Side, Uniform
from kvq_kernels.planar import high_words, low_bits, low_words


@dataclass(frozen=True)
class SideSpec:
    """The shapes of `parts` that a kernel knows. kind: "dense", "uniform" or "codebook"; dim: head_dim."""

    kind: str
    dim: int
    words: int = 0  # of a token's (or code row's) planar codes; of 3 bits: those of the low two
    bits: int = 8
    axis: str = "token"
    group: int = 1
    level: int = 0
    sign_bits: int = 0  # of a group's word of signs, 0: none
    hybrid: bool = False
    tokens: int = 1  # of a codebook's block
    channels: int = 1
    share: int = 1
    entries: int = 0
    shared_heads: bool = False
    half: bool = False  # float16 centroids
    token_scaled: bool = False
    shifted: bool = False  # a zero-point or a mean
    scaled: bool = False  # a standard deviation
    ring: bool = False
    normed: bool = False  # windows are divided when they are read
    slots: int = 0  # of a block of outliers
    block: int = 1  # its tokens
    together: int = 0  # heads whose outliers lie together; 0: each head's apart
    fenced: bool = True  # loads of entries that are fetched whole (see `gather.py`) are kept in their place
    nvidia: bool = True  # instructions that only NVIDIA's GPUs have may be used

    @classmethod
    def of(cls, side: Side, dim: int) -> SideSpec:
        """Of a side that is stored alike for all heads."""
        found = replace(cls._stored(side.packed, dim), ring=side.ring is not None, normed=side.norm is not None)
        if side.outliers is None:
            return found
        lists = side.outliers
        together = 0 if lists.start is None else lists.start.shape[3] - 1
        return replace(found, slots=lists.index.shape[3], block=lists.tokens, together=together)

    @classmethod
    def _stored(cls, packed: Dense | Uniform | Codebook, dim: int) -> SideSpec:
        if isinstance(packed, Dense):
            return cls("dense", dim)
        if isinstance(packed, Uniform):
            sign_bits = 0 if packed.sign is None else 8 * packed.sign.element_size()
            return cls(
                "uniform",
                dim,
                low_words(packed.bits, dim),
                packed.bits,
                packed.axis,
                packed.group,
                packed.level,
                sign_bits,
                packed.hybrid,
                shifted=packed.zero is not None,
            )
        assert isinstance(packed, Codebook)
        (tokens, channels), (heads, books, entries, _) = packed.block, packed.centroids.shape
        bits = int(math.log2(entries))
        words = 0 if bits == 8 else low_words(bits, dim // channels)
        return cls(
            "codebook",
            dim,
            words,
            bits,
            tokens=tokens,
            channels=channels,
            share=dim // books,
            entries=entries,
            shared_heads=heads == 1,
            half=packed.centroids.dtype == torch.float16,
            token_scaled=packed.token_scale is not None,
            shifted=packed.mean is not None,
            scaled=packed.std is not None,
        )

    @property
    def field_bits(self) -> int:
        """Bits of a code that lie in its field of a word; the third bits of 3-bit codes are in words of their own."""
        return low_bits(self.bits)

    @property
    def row(self) -> int:
        """Elements of the codes (or numbers) of a token or block row."""
        if self.kind == "dense":
            return self.dim
        if self.kind == "codebook" and self.bits == 8:
            return self.dim // self.channels
        return self.words + high_words(self.bits, self.dim)


@dataclass(frozen=True)
class Tile:
    """tokens: of a tile of the main loop (a divisor of 128). columns: channels (or codes) handled at once.
    warps, stages: Triton's. waves: programs per multiprocessor that the splits aim at. fences: 1: loads of whole
    entries of codebooks are kept in their place, which ptxas needs, 0: they may be moved ahead. queries: of a product
    with packed numbers, at least: as many as a matrix unit takes. registers: of a thread, at most; 0: as many as the
    compiler likes, which spills a few where that lets more programs run at once. nvidia: 0: without the instructions
    that only NVIDIA's GPUs have, also where the kernel is compiled on a machine without a GPU."""

    tokens: int = 64
    columns: int = 16
    warps: int = 1
    stages: int = 2
    waves: int = 8
    fences: int = 1
    queries: int = 8
    registers: int = 0
    nvidia: int = 1

    def options(self) -> dict[str, int]:
        """Triton's, for a launch. AMD's compiler takes no bound of registers."""
        own = {"num_warps": self.warps, "num_stages": max(1, self.stages)}
        return own | ({"maxnreg": self.registers} if self.registers and torch.version.hip is None else {})


@triton.constexpr_function
def get(spec, name):
    return getattr(spec, name)


@triton.constexpr_function
def row_width(spec):
    return spec.row


@triton.constexpr_function
def block_tokens(keys, values):
    """Tokens of the longer of both sides' codes."""
    return max(keys.tokens, values.tokens)


@triton.constexpr_function
def long_to_compile(keys, values):
    """Whether the loop over whole tiles is so long that what else there is must be a function of its own. On AMD's GPUs
    a function that is called needs a stack."""
    return "codebook" in (keys.kind, values.kind) and keys.nvidia


@triton.constexpr_function
def padded(dim):
    """At least 32: RoPE turns 16 pairs at once, the least that a product sums over."""
    return max(32, triton.next_power_of_2(dim))


@triton.constexpr_function
def plane_count(spec, columns):
    """Pieces of `columns` channels (padded to a power of two)."""
    return padded(spec.dim) // columns


@triton.constexpr_function
def pair_first(style, width, dim, pair):
    """A function of a pair's number would not compile; (a, b, c, d): pair p < width / 2 is (a p, a p + b), a later one
    (p + c, p + d)."""
    half = width // 2
    rest = (dim - width) // 2
    if style == "half":
        return (1, half, half, half + rest)[pair]
    return (2, 1, half, half + rest)[pair]


@triton.constexpr_function
def key_width(spec):
    """Numbers of a key that a thread has beside each other, in fours: Triton's layout of an operand of a product has as
    many together as codes, which they came from, make 32 bits."""
    return 4 if spec.channels == 1 else 8


@triton.constexpr_function
def value_codes(spec):
    """Codes of a row of values that a thread has beside each other."""
    return 4 if spec.dim // spec.channels % 32 == 0 else 2


@triton.constexpr_function
def fenced(spec, keys, h, j):
    """Whether the h-th codes of the j-th plane are loaded behind a fence: between two of them lie as many as take, with
    what turns them, about 64 registers."""
    if keys:
        count = 8 // spec.tokens if spec.channels == 1 else max(1, 2 // spec.tokens)
    else:
        count = max(1, 32 // (value_codes(spec) * spec.tokens * spec.channels))
    return spec.fenced and h + j > 0 and h % count == 0

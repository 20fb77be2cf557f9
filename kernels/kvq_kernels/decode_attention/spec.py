"""Compile-time description of a launch: `SideSpec` (how keys or values are stored) and `Tile` (sizes of tiles).

`parts.py` has the tensors that `SideSpec.of` describes, `configs.py` the table that tiles come from. A kernel reads a
spec's field by `S.name`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton

from kvq_kernels.decode_attention.pages import cells
from kvq_kernels.decode_attention.parts import Dense, Packed, PerHead, Side, Uniform
from kvq_kernels.decode_attention.transformed import Transformed
from kvq_kernels.planar import high_words, low_bits, low_words

#: Channels of a column tile of exact tokens without RoPE.
EXACT_COLUMNS = 64


@dataclass(frozen=True)
class SideSpec:
    """Storage format of keys or values, as a compile-time constant of a kernel.

    kind: "dense", "uniform" or "codebook"; dim: head_dim. Of uniform codes as `Uniform` has them: bits, axis, group,
    level, hybrid; of codebooks as `Codebook` has them: tokens and channels of a code's block, entries.
    """

    kind: str
    dim: int
    itemsize: int = 2  # bytes of a dense number
    words: int = 0  # int32 words of a token's (or code row's) planar codes; of 3-bit codes: of their low two bits
    bits: int = 8
    axis: str = "token"
    group: int = 1
    level: int = 0
    sign_bits: int = 0  # width of a group's word of sign bits, 0: none
    hybrid: bool = False
    tokens: int = 1
    channels: int = 1
    book_channels: int = 1  # channels that share a codebook
    entries: int = 0
    shared_heads: bool = False  # one codebook for all heads
    fp16_centroids: bool = False
    token_scaled: bool = False  # a scale and a zero-point per token, after the codebook
    has_zero: bool = False  # uniform: a zero-point per group; codebook: a mean per channel
    has_std: bool = False  # codebook: a standard deviation per channel
    ring: bool = False  # recent tokens are in a ring buffer
    normed: bool = False  # sinks and recent tokens are divided by a norm per channel when they are read
    outliers: int = 0  # capacity of a block's outlier list
    outlier_block: int = 1  # tokens of that block
    pooled_heads: int = 0  # heads whose outliers share one list; 0: each head has its list
    fenced: bool = True  # scheduling fences between loads of codebook entries (see `vector_codebook.fence`)
    nvidia: bool = True  # PTX assembly may be used
    cell: int = 0  # packed tokens are in pages (`parts.Pages`), so many in a contiguous run; 0: a row is one run
    cells: int = 1  # such runs of a page
    first: int = 0  # place of packed token 0 in pages

    @classmethod
    def of(cls, side: Side, dim: int) -> SideSpec:
        """Spec of a side whose heads are all stored alike."""
        assert not isinstance(side.packed, PerHead)
        cell, runs = (0, 1) if side.pages is None else cells(side)
        spec = replace(cls._stored(side.packed, dim), ring=side.ring is not None, normed=side.norm is not None)
        spec = replace(spec, cell=cell, cells=runs, first=0 if side.pages is None else side.pages.first)
        lists = side.outliers
        if lists is None:
            return spec
        pooled = 0 if lists.start is None else lists.start.shape[-1] - 1
        return replace(spec, outliers=lists.index.shape[-1], outlier_block=lists.tokens, pooled_heads=pooled)

    @classmethod
    def _stored(cls, packed: Packed, dim: int) -> SideSpec:
        if isinstance(packed, Dense):
            return cls("dense", dim, packed.numbers.element_size())
        if isinstance(packed, Uniform):
            sign_bits = 0 if packed.sign is None else 8 * packed.sign.element_size()
            return cls(
                "uniform",
                dim,
                words=low_words(packed.bits, dim),
                bits=packed.bits,
                axis=packed.axis,
                group=packed.group,
                level=packed.level,
                sign_bits=sign_bits,
                hybrid=packed.hybrid,
                has_zero=packed.zero is not None,
            )
        if isinstance(packed, Transformed):
            raise ValueError("codes of a transform's components are read by transform_attention alone")
        (tokens, channels), (heads, books, entries, _) = packed.block, packed.centroids.shape
        bits = int(math.log2(entries))
        words = 0 if bits == 8 else low_words(bits, dim // channels)
        return cls(
            "codebook",
            dim,
            words=words,
            bits=bits,
            tokens=tokens,
            channels=channels,
            book_channels=dim // books,
            entries=entries,
            shared_heads=heads == 1,
            fp16_centroids=packed.centroids.dtype == torch.float16,
            token_scaled=packed.token_scale is not None,
            has_zero=packed.mean is not None,
            has_std=packed.std is not None,
        )

    @property
    def field_bits(self) -> int:
        """Bits of a code in its field of a word; the third bits of 3-bit codes are in words of their own."""
        return low_bits(self.bits)

    @property
    def row(self) -> int:
        """Elements of a row of codes (or of a dense token)."""
        if self.kind == "dense":
            return self.dim
        if self.kind == "codebook" and self.bits == 8:
            return self.dim // self.channels
        return self.words + high_words(self.bits, self.dim)


@dataclass(frozen=True)
class Tile:
    """Launch configuration of decode attention; a row of `tuning.json`.

    tokens:    of a tile of the main loop (a divisor of 128). columns: channels (or codes) handled at once.
    warps, stages: Triton's.
    waves:     programs per multiprocessor that the number of splits aims at.
    fences:    1: scheduling fences between loads of codebook entries, which ptxas needs; 0: none.
    queries:   at least so many columns in a product with packed numbers: as many as a matrix unit takes.
    registers: at most so many per thread, which spills a few where that lets more programs run at once; 0: no limit.
    rows:      of several queries per row, at most so many rows of a kv head in a program, if one query's are not more.
    nvidia:    0: no PTX assembly, also where the kernel is compiled on a machine without a GPU.
    """

    tokens: int = 64
    columns: int = 16
    warps: int = 1
    stages: int = 2
    waves: int = 8
    fences: int = 1
    queries: int = 8
    registers: int = 0
    nvidia: int = 1
    rows: int = 8

    def options(self, queries: int = 1) -> dict[str, int]:
        """Launch options for Triton. AMD's compiler takes no limit of registers; several queries need more of them."""
        options = {"num_warps": self.warps, "num_stages": max(1, self.stages)}
        limited = self.registers and queries == 1 and torch.version.hip is None
        return options | ({"maxnreg": self.registers} if limited else {})


@triton.constexpr_function
def block_tokens(keys: SideSpec, values: SideSpec) -> int:
    """Tokens of a code: the larger of both sides'."""
    return max(keys.tokens, values.tokens)


@triton.constexpr_function
def mixed_out_of_line(keys: SideSpec, values: SideSpec) -> bool:
    """Whether attention to mixed tokens is compiled as a function that is called: the main loop of codebooks is long,
    and a pass of the compiler is quadratic in a function's length. On AMD's GPUs a call needs a stack."""
    return "codebook" in (keys.kind, values.kind) and keys.nvidia


@triton.constexpr_function
def padded_dim(dim: int) -> int:
    """head_dim as a power of two, at least 32: RoPE rotates 16 pairs at once, the least inner size of a product."""
    return max(32, triton.next_power_of_2(dim))


@triton.constexpr_function
def column_tiles(spec: SideSpec, columns: int) -> int:
    """Number of column tiles of `columns` channels in a head, padded to a power of two."""
    return padded_dim(spec.dim) // columns


@triton.constexpr_function
def exact_columns(spec: SideSpec, style: str, pairs: int) -> int:
    """Channels of a column tile of exact tokens; with RoPE pairs of channels, at most `pairs`."""
    return min(EXACT_COLUMNS, padded_dim(spec.dim)) if style == "none" else min(pairs, padded_dim(spec.dim) // 2)


@triton.constexpr_function
def exact_queries(spec: SideSpec, queries: int) -> int:
    """Columns of a product with exact tokens: as many as a matrix unit takes, at least."""
    return max(queries, 8 if spec.nvidia else 16)


@triton.constexpr_function
def pair_offset(style: str, width: int, dim: int, index: int) -> int:
    """Item `index` of (a, b, c, d): pair p < width / 2 is channels (a p, a p + b), a later one (p + c, p + d).

    Scalars, because a function of a pair's number would not compile.
    """
    half = width // 2
    unrotated = (dim - width) // 2
    if style == "half":
        return (1, half, half, half + unrotated)[index]
    return (2, 1, half, half + unrotated)[index]


@triton.constexpr_function
def key_vector(spec: SideSpec) -> int:
    """Neighbouring numbers of a key in one thread: in Triton's MMA operand layout 32 bits of the codes that the operand
    was converted from."""
    return 4 if spec.channels == 1 else 8


@triton.constexpr_function
def value_vector(spec: SideSpec) -> int:
    """Neighbouring codes of a row of values in one thread."""
    return 4 if spec.dim // spec.channels % 32 == 0 else 2


@triton.constexpr_function
def needs_fence(spec: SideSpec, keys: bool, index: int, plane: int) -> bool:
    """Whether load `index` of plane `plane` gets a scheduling fence before it: loads between two fences, with their
    conversions, take about 64 registers."""
    if keys:
        count = 8 // spec.tokens if spec.channels == 1 else max(1, 2 // spec.tokens)
    else:
        count = max(1, 32 // (value_vector(spec) * spec.tokens * spec.channels))
    return spec.fenced and index + plane > 0 and index % count == 0

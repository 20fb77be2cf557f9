"""Codes of a transform's components as operands of matrix products: loaded words, fields, float16 numbers.

A code is never converted: `word & mask` has it in the fraction of two float16 numbers, both halves of the word, as the
subnormal number code * 2^(offset - 24). `fields.py` has the layout. Behind its fields, an operand has one or two that
are 1, whose weights are -S center: the product subtracts the center.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from kvq_kernels import fields
from kvq_kernels.decode_attention.formats.transformed import operand_components


@dataclass(frozen=True)
class FieldSpec:
    """Fields of keys or values, as a compile-time constant of a kernel: widths, and where `fields` places them.

    parts: (bytes of a piece, pieces) of each tensor; places: (number of the word, shift, offset) of each field, words
    of all parts counted in order. components: `operand_components`. gain: whether tokens have one. most_chunks: of
    `chunks`, 0: any number.
    """

    widths: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    places: tuple[tuple[int, int, int], ...]
    components: int
    gain: bool
    most_chunks: int

    @classmethod
    def of(cls, widths: tuple[int, ...], gain: bool, most_chunks: int = 0) -> FieldSpec:
        parts = fields.parts(fields.rate(widths))
        first = [sum(part.words for part in parts[:number]) for number in range(len(parts))]
        places = tuple((first[part] + word, shift, offset) for part, word, shift, offset in fields.places(widths))
        pieces = tuple((part.size, part.words * part.bits // 8 // part.size) for part in parts)
        return cls(widths, pieces, places, operand_components(widths), gain, most_chunks)


@triton.constexpr_function
def chunks(spec: Any) -> tuple[tuple[int, int], ...]:
    """(first, count) of runs of fields with counts that are powers of two; the last of `most_chunks` may go beyond the
    components."""
    found, first, number = [], 0, spec.components // 8
    while first < number:
        count = 1 << ((number - first).bit_length() - 1)
        if len(found) + 1 == spec.most_chunks and count < number - first:
            count *= 2
        found.append((first, count))
        first += count
    return tuple(found)


@triton.constexpr_function
def place(spec: Any, field: int) -> tuple[int, int, int, int]:
    """(word, shift, offset, width) of a field; width 0: one that is 1."""
    return (0, 0, 0, 0) if field >= len(spec.widths) else (*spec.places[field], spec.widths[field])


@triton.jit
def _split_words(x, W: tl.constexpr):
    """[..., W] as a tuple of W tensors, W a power of two."""
    if W == 1:
        return (tl.reshape(x, x.shape[:-1]),)
    else:
        a, b = tl.split(tl.reshape(x, x.shape[:-1] + [W // 2, 2]))
        first, second = _split_words(a, W // 2), _split_words(b, W // 2)
        words = ()
        for i in tl.static_range(W // 2):
            words = words + (first[i], second[i])
        return words


@triton.jit
def _load_piece(
    base, shifts, row, mask, SIZE: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, LANES: tl.constexpr
):
    """Words [rows, LANES] of a piece as a tuple; those of 16 and 8 bits are spread to two halves of 16 bits."""
    if SIZE >= 4:
        W: tl.constexpr = SIZE // 4
        lane, word = tl.arange(0, LANES)[None, :, None], tl.arange(0, W)[None, None, :]
        offset = row[:, None, None] * (LANES * PIECES * W) + lane * (PIECES * W) + (PIECE * W + word)
        return _split_words(tl.load(base + offset, mask=mask[:, None, None]), W)
    else:
        # All lanes of a word load it, and what they shift it by: from anything but loads, Triton moves operands through
        # shared memory.
        SHARED: tl.constexpr = 4 // SIZE
        HALF: tl.constexpr = 4 * SIZE  # bits
        lane = tl.arange(0, LANES)[None, :]
        x = tl.load(base + (row[:, None] * (LANES // SHARED) + lane // SHARED), mask=mask[:, None])
        x = x >> tl.load(shifts + (SHARED // 2 - 1) * 8 + lane)
        return ((x & ((1 << HALF) - 1)) | ((x & (((1 << HALF) - 1) << HALF)) << (16 - HALF)),)


@triton.jit
def _load_part(base, shifts, row, mask, SIZE: tl.constexpr, PIECES: tl.constexpr, LANES: tl.constexpr):
    """Words of all pieces of a part, as a tuple."""
    words = ()
    for piece in tl.static_range(PIECES):
        words = words + _load_piece(base, shifts, row, mask, SIZE, PIECES, piece, LANES)
    return words


@triton.jit
def load_codes(
    parts, shifts, tile, remaining, F: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, LANES: tl.constexpr
):
    """Words [ROWS, LANES] of all parts, as a tuple. parts: pointers at the first packed token; a row has TOKENS tokens.
    Rows from token `remaining` of the tile on are not read. shifts: `transformed.lane_shifts`."""
    row = tl.arange(0, ROWS)
    mask = row * TOKENS < remaining
    PARTS: tl.constexpr = F.parts
    words = ()
    for i in tl.static_range(len(PARTS)):
        base = parts[i] + tile * (ROWS * LANES * PARTS[i][0] * PARTS[i][1] // 4)
        words = words + _load_part(base, shifts, row, mask, PARTS[i][0], PARTS[i][1], LANES)
    return words


@triton.jit
def load_gains(pointers, tile, remaining, F: tl.constexpr, N: tl.constexpr):
    """Gains float16 [N] of a tile's tokens, of four uint8 in a word; 0 without gains.

    pointers: as in `load_codes`, the gains' last.
    """
    if F.gain:
        token = tl.arange(0, N)
        x = tl.load(pointers[len(pointers) - 1] + tile * (N // 4) + token // 4, mask=token < remaining)
        number = (x >> (8 * (token % 4))) & 255 | 0x4B000000  # 2^23 + n, without a conversion
        return tl.exp2(number.to(tl.float32, bitcast=True) * 0.0625 - 524296.0).to(tl.float16)
    else:
        return 0


@triton.jit
def _half_pair(words, F: tl.constexpr, FIELD: tl.constexpr):
    """The bits of a field of both halves of its words, int16 [rows, lanes, 2]."""
    P: tl.constexpr = place(F, FIELD)
    if P[3] == 0:
        return tl.full(words[0].shape + [2], 0x3C00, tl.int16)  # 1.0
    else:
        MASK: tl.constexpr = ((1 << P[3]) - 1) << P[2]
        x = (words[P[0]] >> P[1]) & (MASK | (MASK << 16))
        return tl.join(x.to(tl.int16), (x >> 16).to(tl.int16))


@triton.jit
def stacked(words, F: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """int16 [rows, lanes, 2, COUNT] of fields FIRST to FIRST + COUNT - 1."""
    if COUNT == 1:
        x = _half_pair(words, F, FIRST)
        return tl.reshape(x, x.shape + [1])
    else:
        a = stacked(words, F, FIRST, COUNT // 2)
        b = stacked(words, F, FIRST + COUNT // 2, COUNT // 2)
        x = tl.permute(tl.join(a, b), (0, 1, 2, 4, 3))
        return tl.reshape(x, x.shape[:-2] + [COUNT])


# Numbers of the last shape become float16: Triton would move the reshaping of a product's operand into shared memory.


@triton.jit
def key_codes(words, F: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, N: tl.constexpr):
    """float16 [N, 8 COUNT]: component 8 f + 2 lane + half of each token."""
    z = tl.permute(stacked(words, F, FIRST, COUNT), (0, 3, 1, 2))
    return tl.reshape(z, [N, 8 * COUNT]).to(tl.float16, bitcast=True)


@triton.jit
def value_codes(words, F: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, BLOCKS: tl.constexpr):
    """float16 [BLOCKS, 8 COUNT, 16]: component 8 f + lane of token 2 pair + half of each block."""
    z = tl.reshape(stacked(words, F, FIRST, COUNT), [BLOCKS, 8, 8, 2, COUNT])
    z = tl.permute(z, (0, 4, 2, 1, 3))
    return tl.reshape(z, [BLOCKS, 8 * COUNT, 16]).to(tl.float16, bitcast=True)

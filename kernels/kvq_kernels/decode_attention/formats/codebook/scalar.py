"""Scalar codebooks of at most 16 entries shared by all channels: numbers are looked up in registers (KVQuant).

`byte_permute.py` does the lookup; `vector.py` is the path for codes of several numbers.

As there, numbers are made by the threads that hold them as MMA operands: for keys 8 rows x 4 threads, for values 8
threads of words x 4 of rows. The two numbers of a register come from two words (of one token, or from the same position
of two tokens), so that their partners in rotations and sums are neighbours, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvq_kernels.decode_attention.formats.codebook.byte_permute import (
    decode_one_word,
    decode_two_words,
    fields,
    load_table,
)
from kvq_kernels.decode_attention.formats.codebook.vector import whole_queries
from kvq_kernels.decode_attention.formats.format import KeyReader, ValueReader
from kvq_kernels.decode_attention.formats.shared import no_prefetch
from kvq_kernels.decode_attention.layout_hints import load, load_fields
from kvq_kernels.decode_attention.rope import STEP, unrotate
from kvq_kernels.decode_attention.subtiles import subtile_tokens

if TYPE_CHECKING:
    from kvq_kernels.decode_attention.formats.codebook import CodebookSpec
    from kvq_kernels.decode_attention.formats.format import TileLoop


@triton.jit
def key_words(S: tl.constexpr):
    """Words of a row in each of 4 threads, [1, 1, 4, V]; threads in reverse order, since Triton would give contiguous
    single words to one thread."""
    V: tl.constexpr = S.words // 4
    return (3 - tl.arange(0, 4))[None, None, :, None] * V + tl.arange(0, V)[None, None, None, :]


@triton.jit
def decode_key_fields(codes, table, S: tl.constexpr, line):
    """Tuple over fields of float16 [A, 8, 4, V]: key numbers of rows `line` [A, 8, 1, 1]."""
    A: tl.constexpr = line.shape[0]
    W: tl.constexpr = S.words
    V: tl.constexpr = W // 4
    row = codes + line * S.row
    low = load(row, key_words(S))
    high = low
    if S.bits == 3:
        thread = (3 - tl.arange(0, 4))[None, None, :, None]
        high = load(row, W + thread % 2 * V + tl.arange(0, V)[None, None, None, :]) >> (thread // 2)
    if V == 1:
        return decode_one_word(low, high, table, S)
    else:
        a, b = tl.split(tl.reshape(low, [A, 8, 4, V // 2, 2]))
        ah, bh = tl.split(tl.reshape(high, [A, 8, 4, V // 2, 2]))
        numbers = ()
        x = decode_two_words(a, b, ah, bh, table, S, 0, 2)
        for f in tl.static_range(fields(S)):
            numbers = numbers + (tl.reshape(x[f], [A, 8, 4, V]),)
        return numbers


@triton.constexpr_function
def fields_per_product(spec: CodebookSpec) -> int:
    """Fields in one product with queries."""
    return max(1, 16 // spec.words)


@triton.constexpr_function
def rotated_fields(spec: CodebookSpec, style: str, width: int) -> int:
    """Pairs of fields that RoPE rotates; also the distance between the two fields of a pair."""
    return 0 if style == "none" else width // 2 // spec.words


@triton.constexpr_function
def paired_field(spec: CodebookSpec, rotated: int, pair: int, second: bool) -> int:
    """First or second field of a pair: rotated pairs come first, then pairs of the other fields."""
    if pair < rotated:
        return pair + rotated if second else pair
    return pair + fields(spec) // 2 if second else pair + rotated


@triton.jit
def product_operand(parts, first: tl.constexpr, S: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """[A B, 16 or 32]: `fields_per_product` tensors [A, B, 4, V] from index `first` on as an operand of a product."""
    V: tl.constexpr = S.words // 4
    G: tl.constexpr = fields_per_product(S)
    x = parts[first]
    if G == 1:
        x = tl.permute(tl.reshape(x, [A, B, 4, V // 4, 4]), (0, 1, 3, 2, 4))
    elif G == 2:
        x = tl.permute(tl.join(x, parts[first + 1]), (0, 1, 2, 4, 3))
    else:
        x = tl.join(tl.join(x, parts[first + 2]), tl.join(parts[first + 1], parts[first + 3]))
        x = tl.permute(x, (0, 1, 2, 3, 5, 4))
    return tl.reshape(x, [A * B, 4 * V * G])


@triton.jit
def unrotated_queries(
    q, S: tl.constexpr, rope, position, STYLE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Queries rotated back by `position`, as right operands for the first and second fields of pairs."""
    D: tl.constexpr = S.dim
    W: tl.constexpr = S.words
    ROTATED: tl.constexpr = rotated_fields(S, STYLE, WIDTH)
    member, word = tl.arange(0, M)[None, :, None, None], key_words(S)
    mask = (member < GROUP) & (word >= 0)
    a = load_fields(q + member * D, word, 0, fields(S), W, mask)
    if ROTATED > 0:
        coarse, fine = rope[0] + position // STEP * WIDTH + 0 * member, rope[1] + position % STEP * WIDTH + 0 * member
        cos1, sin1 = load_fields(coarse, word, 0, ROTATED, W), load_fields(coarse + WIDTH // 2, word, 0, ROTATED, W)
        cos2, sin2 = load_fields(fine, word, 0, ROTATED, W), load_fields(fine + WIDTH // 2, word, 0, ROTATED, W)
    first, second = (), ()
    for i in tl.static_range(fields(S) // 2):
        q1 = a[paired_field(S, ROTATED, i, False)].to(tl.float32)
        q2 = a[paired_field(S, ROTATED, i, True)].to(tl.float32)
        if i < ROTATED:
            q1, q2 = unrotate(q1, q2, cos1[i], sin1[i])
            q1, q2 = unrotate(q1, q2, cos2[i], sin2[i])
        first, second = first + (q1.to(T),), second + (q2.to(T),)
    operands = ()
    for i in tl.static_range(0, fields(S) // 2, fields_per_product(S)):
        operands = operands + (
            tl.trans(product_operand(first, i, S, 1, M)),
            tl.trans(product_operand(second, i, S, 1, M)),
        )
    return operands


@triton.jit
def scores(q, table, k, tile, rope, start, C: tl.constexpr):
    """See `KeyReader`."""
    S: tl.constexpr = C.S
    STYLE: tl.constexpr = C.STYLE
    WIDTH: tl.constexpr = C.WIDTH
    GROUP: tl.constexpr = C.GROUP
    M: tl.constexpr = C.M
    L: tl.constexpr = C.L
    R: tl.constexpr = C.R
    BLOCK: tl.constexpr = C.BLOCK
    T: tl.constexpr = C.T
    PRECISION: tl.constexpr = C.PRECISION
    begin = tile * C.N
    W: tl.constexpr = S.words
    ROTATED: tl.constexpr = rotated_fields(S, STYLE, WIDTH)
    line = tl.arange(0, R // 8)[:, None, None, None] * 8 + tl.arange(0, 8)[None, :, None, None]
    word = key_words(S)
    codes = k.codes + begin * S.row
    tl.debug_barrier()  # keeps loop-invariant loads from being hoisted, which would spill
    queries = unrotated_queries(q, S, rope, start + begin, STYLE, WIDTH, GROUP, M, T)
    if S.has_std:
        row0 = tl.zeros([1, 8, 1, 1], tl.int32)  # the same for all rows
        std, mean = (
            load_fields(k.std + row0, word, 0, fields(S), W),
            load_fields(k.mean + row0, word, 0, fields(S), W),
        )
    FIELDS_AT_ONCE: tl.constexpr = 4 if S.outliers > 0 else ROTATED  # outliers need registers, too
    qk = ()
    for i in tl.static_range(L):
        within = subtile_tokens(line, i, R, BLOCK)
        x = decode_key_fields(codes, table, S, within)
        if S.has_std:
            scaled = ()
            for f in tl.static_range(fields(S)):
                scaled = scaled + (tl.fma(x[f], std[f].to(T), mean[f].to(T)),)
            x = scaled
        row = rope[2] + within * WIDTH if ROTATED > 0 else 0
        first, second = (), ()
        for j in tl.static_range(fields(S) // 2):
            x1, x2 = x[paired_field(S, ROTATED, j, False)], x[paired_field(S, ROTATED, j, True)]
            if j < ROTATED:
                if j % FIELDS_AT_ONCE == 0:
                    cos = load_fields(row, word, j, min(FIELDS_AT_ONCE, ROTATED - j), W)
                    sin = load_fields(row + WIDTH // 2, word, j, min(FIELDS_AT_ONCE, ROTATED - j), W)
                cosine, sine = cos[j % FIELDS_AT_ONCE], sin[j % FIELDS_AT_ONCE]
                x1, x2 = tl.fma(x1, cosine, -(sine * x2)), tl.fma(x1, sine, cosine * x2)
            first, second = first + (x1,), second + (x2,)
        s = tl.zeros([R, M], tl.float32)
        for j in tl.static_range(0, fields(S) // 2, fields_per_product(S)):
            a1, a2 = product_operand(first, j, S, R // 8, 8), product_operand(second, j, S, R // 8, 8)
            s = tl.dot(a1, queries[2 * j // fields_per_product(S)], s, input_precision=PRECISION)
            s = tl.dot(a2, queries[2 * j // fields_per_product(S) + 1], s, input_precision=PRECISION)
        qk = qk + (tl.trans(s),)
    return qk


@triton.constexpr_function
def tile_count(constants: TileLoop) -> int:
    """Accumulator tiles of values, of 16 or 32 channels."""
    spec: CodebookSpec = constants.S
    return spec.dim // max(16, spec.words)


@triton.jit
def tile_channels(i: tl.constexpr, S: tl.constexpr):
    """Channels of accumulator tile i."""
    row = tl.arange(0, max(16, S.words))
    return tile_channel(i, row // 8, row % 8, S)


@triton.jit
def tile_channel(i: tl.constexpr, register, thread, S: tl.constexpr):
    """Channel of accumulator tile i in row `register` of each of 8 threads."""
    W: tl.constexpr = S.words
    B: tl.constexpr = max(1, W // 8)
    if B > 1:
        return i * W + (7 - thread) * B + register
    else:
        field = 2 * i + register + thread // W * (fields(S) // 2)
        return field * W + (7 - thread) % W


@triton.constexpr_function
def tile_steps(index: int, constants: TileLoop) -> tuple[int, ...]:
    """Distances in channels from a thread's first row of tile 0 to each of its rows of tile `index`."""
    spec: CodebookSpec = constants.S
    words = spec.words
    if words > 8:
        return tuple(index * words + row for row in range(words // 8))
    return tuple((2 * index + row) * words for row in range(2))


@triton.jit
def init(C: tl.constexpr):
    """Empty accumulator: tiles, and the sums of p times zero-points [M]."""
    M: tl.constexpr = C.M
    WORDS: tl.constexpr = C.S.words
    sums = ()
    for _ in tl.static_range(tile_count(C)):
        sums = sums + (tl.zeros([max(16, WORDS), M], tl.float32),)
    return sums, tl.zeros([M], tl.float32)


@triton.jit
def decode_value_fields(codes, table, S: tl.constexpr, begin, i: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    """Tuple over fields of float16 [R / 8, 8, 4, B, 2]: value numbers of subtile i of the tile that starts at `begin`.

    Row 16 n + 4 t + 2 h + l is at [2 n + h, :, t, :, l]. Of 4 words, 8 threads have half a word each.
    """
    W: tl.constexpr = S.words
    B: tl.constexpr = max(1, W // 8)
    register = tl.arange(0, R // 4)[:, None, None, None]
    line = register // 4 * 16 + tl.arange(0, 4)[None, None, :, None] * 4 + register % 4
    thread = tl.arange(0, 8)[None, :, None, None]
    word, neighbour = (7 - thread) % (W // B) * B, tl.arange(0, B)[None, None, None, :]
    row = codes + (begin + subtile_tokens(line, i, R, BLOCK)) * S.row
    a, b = _halves(load(row, word + neighbour), R, B)
    ah, bh = a, b
    if S.bits == 3:
        high = load(row, W + (7 - thread) % (W // B // 2) * B + neighbour) >> (word // (W // 2))
        ah, bh = _halves(high, R, B)
    if W == 4:
        return decode_two_words(a, b, ah, bh, table, S, thread // 4, 1)
    else:
        return decode_two_words(a, b, ah, bh, table, S, 0, 2)


@triton.jit
def _halves(x, R: tl.constexpr, B: tl.constexpr):
    """Even and odd entries of the first axis of [R / 4, 8, 4, B]: [R / 8, 8, 4, B] each."""
    return tl.split(tl.permute(tl.reshape(x, [R // 8, 2, 8, 4, B]), (0, 2, 3, 4, 1)))


@triton.jit
def accumulate(acc, p, alpha, prefetched, table, v, tile, C: tl.constexpr):
    """See `ValueReader`: sum_t p (s c + z) = sum_t (p s) c + sum_t p z with s, z per token: accumulator tiles float32
    [channels of `tile_channels`, M], and the second sum [M], which all channels share."""
    S: tl.constexpr = C.S
    M: tl.constexpr = C.M
    L: tl.constexpr = C.L
    R: tl.constexpr = C.R
    BLOCK: tl.constexpr = C.BLOCK
    T: tl.constexpr = C.T
    PRECISION: tl.constexpr = C.PRECISION
    begin = tile * C.N
    W: tl.constexpr = S.words
    sums, offset = acc
    tl.debug_barrier()  # not while keys still fill the registers
    shifts = tl.zeros([M, R], tl.float32)
    parts = ()
    for j in tl.static_range(tile_count(C)):
        parts = parts + (sums[j] * alpha[None, :],)
    for i in tl.static_range(L):
        w = p[i]
        if S.token_scaled:
            token = begin + subtile_tokens(tl.arange(0, R), i, R, BLOCK)
            shifts += w * tl.load(v.token_zero + token).to(tl.float32)[None, :]
            w *= tl.load(v.token_scale + token).to(tl.float32)[None, :]
        w = tl.trans(w.to(T))
        x = decode_value_fields(v.codes, table, S, begin, i, R, BLOCK)
        new = ()
        for j in tl.static_range(tile_count(C)):
            if W <= 8:
                x_t = tl.reshape(tl.join(x[2 * j], x[2 * j + 1]), [R // 16, 2, 8, 4, 2, 2])
                x_t = tl.permute(x_t, (5, 2, 0, 3, 1, 4))
            else:
                x_t = tl.permute(tl.reshape(x[j], [R // 16, 2, 8, 4, W // 8, 2]), (4, 2, 0, 3, 1, 5))
            x_t = tl.reshape(x_t, [max(16, W), R])
            new = new + (tl.dot(x_t, w, parts[j], input_precision=PRECISION),)
        parts = new
    return parts, offset * alpha + tl.sum(shifts, axis=1)


@triton.jit
def store(acc, out, l_i, C: tl.constexpr):
    """See `ValueReader`."""
    S: tl.constexpr = C.S
    M: tl.constexpr = C.M
    sums, offset = acc
    for j in tl.static_range(tile_count(C)):
        channel = tile_channels(j, S)
        mask = (tl.arange(0, M)[None, :] < C.GROUP) & (channel[:, None] >= 0)
        tl.store(out[None, :] + channel[:, None], (sums[j] + offset[None, :]) / l_i[None, :], mask=mask)


@triton.jit
def first_channel(thread, C: tl.constexpr):
    """Channel of row 0 of accumulator tile 0 in each of 8 threads."""
    S: tl.constexpr = C.S
    return tile_channel(0, 0, thread, S)


KEYS = KeyReader("codebook.scalar.keys", subtiles=True, table=load_table, queries=whole_queries, scores=scores)
VALUES = ValueReader(
    "codebook.scalar.values",
    subtiles=True,
    table=load_table,
    init=init,
    prefetch=no_prefetch,
    accumulate=accumulate,
    store=store,
    tiles=tile_count,
    steps=tile_steps,
    channel=first_channel,
    paired=True,
)

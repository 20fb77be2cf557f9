"""Vector codebooks of 256 float16 entries: one load of 4, 8 or 16 bytes per code brings all numbers of its block.

`uniform.planes` explains the layouts; `scalar.py` is the path for codebooks of single numbers.

The tokens of a code are in the same row of different subtiles, see `subtiles.py`. With RoPE the key of token t of a
code is R(start) R(t) R(within) x, where `within` is the position of the code's first token in the tile: the first two
rotations are undone on the query, once for all codes.

Numbers are loaded by the threads that hold them as MMA operands: for keys 8 rows x 4 threads of neighbouring numbers,
for values 8 threads of neighbouring codes x 4 of neighbouring rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvq_kernels.decode_attention.formats.format import KeyReader, ValueReader
from kvq_kernels.decode_attention.formats.shared import no_prefetch, nothing
from kvq_kernels.decode_attention.layout_hints import load, load_once, unstack_last
from kvq_kernels.decode_attention.rope import STEP, half_pairs, load_cos_sin, unrotate_by_row
from kvq_kernels.decode_attention.subtiles import SUBTILE, subtile_tokens

if TYPE_CHECKING:
    from kvq_kernels.decode_attention.formats.codebook import CodebookSpec
    from kvq_kernels.decode_attention.formats.format import TileLoop


@triton.constexpr_function
def key_vector(spec: CodebookSpec) -> int:
    """Neighbouring numbers of a key in one thread: in Triton's MMA operand layout 32 bits of the codes that the operand
    was converted from."""
    return 4 if spec.channels == 1 else 8


@triton.constexpr_function
def value_vector(spec: CodebookSpec) -> int:
    """Neighbouring codes of a row of values in one thread."""
    return 4 if spec.dim // spec.channels % 32 == 0 else 2


@triton.constexpr_function
def needs_fence(spec: CodebookSpec, keys: bool, index: int, plane: int) -> bool:
    """Whether load `index` of plane `plane` gets a scheduling fence before it: loads between two fences, with their
    conversions, take about 64 registers."""
    if keys:
        count = 8 // spec.tokens if spec.channels == 1 else max(1, 2 // spec.tokens)
    else:
        count = max(1, 32 // (value_vector(spec) * spec.tokens * spec.channels))
    return spec.fenced and index + plane > 0 and index % count == 0


@triton.jit
def fence(begin, ENABLED: tl.constexpr):
    """Scheduling fence for ptxas: uses earlier loads before later loads are issued, which else spill registers.

    A loop that never runs (`begin` is not negative): ptxas schedules nothing across a loop, but does across a barrier.
    """
    if ENABLED:
        while begin < 0:
            tl.debug_barrier()
            begin *= begin


@triton.jit
def load_entries(packed, S: tl.constexpr, codes, row, column, FIRST: tl.constexpr):
    """float16 [B, A, 8, 4, tokens, channels]: codebook entries of the codes in rows `row` [A, 8 or 1, 4 or 1, 1] and
    columns FIRST + `column` [1, 8 or 1, 4 or 1, B]."""
    C: tl.constexpr = S.channels
    SIZE: tl.constexpr = S.tokens * C
    # Codes leave the L1 cache to the codebooks.
    code = tl.permute(load_once(codes + row * (S.dim // C), FIRST + column), (3, 0, 1, 2))
    book = tl.permute((FIRST + column) * C // S.book_channels * 256, (3, 0, 1, 2))
    # Index whole entries (or halves): shift and add are then one instruction.
    if SIZE == 2:
        pointers = packed.centroids.to(tl.pointer_type(tl.int32), bitcast=True) + book + code.to(tl.uint32)
    else:
        entries = packed.centroids.to(tl.pointer_type(tl.int64), bitcast=True)
        pointers = entries + book * (SIZE // 4) + code.to(tl.uint32) * (SIZE // 4)
    pointers = pointers.to(tl.pointer_type(tl.float16), bitcast=True)
    pointers = tl.multiple_of(pointers, (2 * SIZE, 2 * SIZE, 2 * SIZE, 2 * SIZE))
    x = load(pointers[:, :, :, :, None], tl.arange(0, SIZE)[None, None, None, None, :])
    return tl.reshape(x, [code.shape[0], code.shape[1], 8, 4, S.tokens, C])


@triton.jit
def decode_keys(k, S: tl.constexpr, codes, row, column, channel, T: tl.constexpr, FIRST: tl.constexpr):
    """Key numbers [2, 8, 4, V, tokens], V per thread, of channels `channel` [1, 1, 4, V]."""
    V: tl.constexpr = key_vector(S)
    x = load_entries(k, S, codes, row, column, FIRST).to(T)
    x = tl.reshape(tl.permute(x, (1, 2, 3, 0, 5, 4)), [2, 8, 4, V, S.tokens])
    return denormalize(x, k, S, channel[:, :, :, :, None])


@triton.jit
def key_operands(y, S: tl.constexpr):
    """[2, 8, 4, V, tokens] as left operands, one for each token of a code."""
    V: tl.constexpr = key_vector(S)
    TOKENS: tl.constexpr = S.tokens
    y = tl.permute(tl.reshape(y, [2, 8, 4, V // 4, 4, TOKENS]), (0, 1, 3, 2, 4, 5))
    return unstack_last(tl.reshape(y, [SUBTILE, 4 * V, TOKENS]), SUBTILE, 4 * V, TOKENS)


@triton.jit
def replace_item(tiles, i: tl.constexpr, tile):
    """The tuple `tiles` with item i replaced by `tile`."""
    return tiles[:i] + (tile,) + tiles[i + 1 :]


@triton.jit
def denormalize(x, packed, S: tl.constexpr, channel):
    """x std + mean where the side has them, else x."""
    if S.has_std:
        return tl.fma(x, tl.load(packed.std + channel).to(x.dtype), tl.load(packed.mean + channel).to(x.dtype))
    else:
        return x


@triton.jit
def query_operand(a, T: tl.constexpr, M: tl.constexpr, V: tl.constexpr):
    """[1, M, 4, V] as right operand of products with keys."""
    a = tl.permute(tl.reshape(a.to(T), [M, 4, V // 4, 4]), (0, 2, 1, 3))
    return tl.trans(tl.reshape(a, [M, 4 * V]))


@triton.jit
def unrotated_queries(
    q, rope, coarse, fine, pair, c1, c2, S: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Right operands for each token of a code: queries rotated back, channels c1 and c2 [1, 1, 4, V]."""
    D: tl.constexpr = S.dim
    V: tl.constexpr = key_vector(S)
    TOKENS: tl.constexpr = S.tokens
    member = tl.arange(0, M)[None, :, None, None]
    mask = (member < GROUP) & (pair >= 0)
    q1 = load(q + member * D, c1, mask, 0.0).to(tl.float32)
    q2 = load(q + member * D, c2, mask, 0.0).to(tl.float32)
    q1, q2 = unrotate_by_row(q1, q2, coarse, 0 * member, pair, WIDTH, D)
    q1, q2 = unrotate_by_row(q1, q2, fine, 0 * member, pair, WIDTH, D)
    unrotated = (query_operand(q1, T, M, V), query_operand(q2, T, M, V))
    for t in tl.static_range(1, TOKENS):
        a1, a2 = unrotate_by_row(q1, q2, rope[1] + t * WIDTH, 0 * member, pair, WIDTH, D)
        unrotated = unrotated + (query_operand(a1, T, M, V), query_operand(a2, T, M, V))
    return unrotated


@triton.jit
def scores(q, table, k, tile, rope, start, CONST: tl.constexpr):
    """See `KeyReader`."""
    S: tl.constexpr = CONST.S
    STYLE: tl.constexpr = CONST.STYLE
    WIDTH: tl.constexpr = CONST.WIDTH
    GROUP: tl.constexpr = CONST.GROUP
    M: tl.constexpr = CONST.M
    L: tl.constexpr = CONST.L
    BLOCK: tl.constexpr = CONST.BLOCK
    T: tl.constexpr = CONST.T
    PRECISION: tl.constexpr = CONST.PRECISION
    begin = tile * CONST.N
    D: tl.constexpr = S.dim
    C: tl.constexpr = S.channels
    TOKENS: tl.constexpr = S.tokens
    V: tl.constexpr = key_vector(S)
    PLANE: tl.constexpr = 4 * V
    FENCED: tl.constexpr = S.fenced
    line = tl.arange(0, 2)[:, None, None, None] * 8 + tl.arange(0, 8)[None, :, None, None]
    member = tl.arange(0, M)[None, :, None, None]
    thread = tl.arange(0, 4)
    if FENCED:  # opaque: `begin` changes nothing, but keeps addresses from being hoisted, which would spill
        thread = tl.minimum(thread, 3 + begin)
    thread = thread[None, None, :, None]
    channel_in_plane, code = thread * V + tl.arange(0, V), thread * (V // C) + tl.arange(0, V // C)
    mask = (member < GROUP) & (channel_in_plane >= 0)
    codes = k.codes + begin // TOKENS * (D // C)
    tl.debug_barrier()  # keeps loop-invariant loads from being hoisted
    sums = ()
    for _ in tl.static_range(L):
        sums = sums + (tl.zeros([SUBTILE, M], tl.float32),)
    if STYLE == "none":
        for j in tl.static_range(D // PLANE):
            channel = j * PLANE + channel_in_plane
            a = query_operand(load(q + member * D, channel, mask, 0.0), T, M, V)
            for h in tl.static_range(L // TOKENS):
                fence(begin, needs_fence(S, True, h, j))
                row = subtile_tokens(line, h * TOKENS, SUBTILE, BLOCK) // TOKENS
                x = key_operands(decode_keys(k, S, codes, row, code, channel, T, j * PLANE // C), S)
                for t in tl.static_range(TOKENS):
                    s = tl.dot(x[t], a, sums[h * TOKENS + t], input_precision=PRECISION)
                    sums = replace_item(sums, h * TOKENS + t, s)
    else:
        coarse = rope[0] + (start + begin) // STEP * WIDTH
        fine = rope[1] + (start + begin) % STEP * WIDTH
        for j in tl.static_range(D // PLANE // 2):
            pair = j * PLANE + channel_in_plane
            c1, c2 = half_pairs(pair, WIDTH // 2, D)
            if not FENCED:
                unrotated = unrotated_queries(q, rope, coarse, fine, pair, c1, c2, S, WIDTH, GROUP, M, T)
            for h in tl.static_range(L // TOKENS):
                fence(begin, needs_fence(S, True, h, j))
                within = subtile_tokens(line, h * TOKENS, SUBTILE, BLOCK)
                row = within // TOKENS
                if WIDTH == D:
                    x1 = decode_keys(k, S, codes, row, code, c1, T, j * PLANE // C)
                    x2 = decode_keys(k, S, codes, row, code, c2, T, (j * PLANE + D // 2) // C)
                else:
                    first, second = half_pairs(j * PLANE // C + code, WIDTH // 2 // C, D // C)
                    x1 = decode_keys(k, S, codes, row, first, c1, T, 0)
                    x2 = decode_keys(k, S, codes, row, second, c2, T, 0)
                cos, sin = load_cos_sin(rope[1 if tl.float32 == T else 2], within, pair, WIDTH, D)
                cos, sin = cos.to(T)[:, :, :, :, None], sin.to(T)[:, :, :, :, None]
                y1 = key_operands(tl.fma(x1, cos, -sin * x2), S)
                y2 = key_operands(tl.fma(x1, sin, cos * x2), S)
                if FENCED and h == 0:
                    fence(begin, L == TOKENS)  # of long codes: rotate queries after keys
                    unrotated = unrotated_queries(q, rope, coarse, fine, pair, c1, c2, S, WIDTH, GROUP, M, T)
                for t in tl.static_range(TOKENS):
                    s = tl.dot(y1[t], unrotated[2 * t], sums[h * TOKENS + t], input_precision=PRECISION)
                    s = tl.dot(y2[t], unrotated[2 * t + 1], s, input_precision=PRECISION)
                    sums = replace_item(sums, h * TOKENS + t, s)
    qk = ()
    for i in tl.static_range(L):
        qk = qk + (tl.trans(sums[i]),)
    return qk


@triton.constexpr_function
def tile_count(constants: TileLoop) -> int:
    """Accumulator tiles of values."""
    return constants.S.dim // (8 * value_vector(constants.S))


@triton.jit
def tile_channels(i: tl.constexpr, S: tl.constexpr):
    """Channels of accumulator tile i: one of each of its codes."""
    row = tl.arange(0, 8 * value_vector(S))
    return tile_channel(i, row // 8, row % 8, S)


@triton.jit
def tile_channel(i: tl.constexpr, register, thread, S: tl.constexpr):
    """Channel of accumulator tile i in row `register` of each of 8 threads."""
    B: tl.constexpr = value_vector(S)
    C: tl.constexpr = S.channels
    return (thread * B + register + i // C * (8 * B)) * C + i % C


@triton.constexpr_function
def tile_steps(index: int, constants: TileLoop) -> tuple[int, ...]:
    """Distances in channels from a thread's first row of tile 0 to each of its rows of tile `index`."""
    codes, channels = value_vector(constants.S), constants.S.channels
    return tuple((row + index // channels * 8 * codes) * channels + index % channels for row in range(codes))


@triton.jit
def init(C: tl.constexpr):
    """Empty accumulator tiles."""
    M: tl.constexpr = C.M
    acc = ()
    for _ in tl.static_range(tile_count(C)):
        acc = acc + (tl.zeros([8 * value_vector(C.S), M], tl.float32),)
    return acc


@triton.jit
def accumulate(acc, p, alpha, prefetched, table, v, tile, CONST: tl.constexpr):
    """See `ValueReader`: accumulator tiles float32 [channels of `tile_channels`, M]."""
    S: tl.constexpr = CONST.S
    M: tl.constexpr = CONST.M
    L: tl.constexpr = CONST.L
    BLOCK: tl.constexpr = CONST.BLOCK
    T: tl.constexpr = CONST.T
    PRECISION: tl.constexpr = CONST.PRECISION
    begin = tile * CONST.N
    C: tl.constexpr = S.channels
    TOKENS: tl.constexpr = S.tokens
    B: tl.constexpr = value_vector(S)
    JOINED: tl.constexpr = 2 if TOKENS > 1 else 1  # tokens of a code in one product
    NEIGHBOURS: tl.constexpr = 4 // JOINED
    thread, register = tl.arange(0, 4)[None, None, :, None], tl.arange(0, 4)[:, None, None, None]
    line = register // NEIGHBOURS * (4 * NEIGHBOURS) + thread * NEIGHBOURS + register % NEIGHBOURS
    code = tl.arange(0, 8)[None, :, None, None] * B + tl.arange(0, B)
    codes = v.codes + begin // TOKENS * (S.dim // C)
    tl.debug_barrier()
    operands = ()
    for i in tl.static_range(L // JOINED):
        w = p[i].to(T) if JOINED == 1 else tl.reshape(tl.join(p[2 * i].to(T), p[2 * i + 1].to(T)), [M, 2 * SUBTILE])
        operands = operands + (tl.trans(w),)
    new = ()
    for j in tl.static_range(tile_count(CONST) // C):
        parts = ()
        for c in tl.static_range(C):
            parts = parts + (acc[j * C + c] * alpha[None, :],)
        for h in tl.static_range(L // TOKENS):
            fence(begin, needs_fence(S, False, h, j))
            row = subtile_tokens(line, h * TOKENS, SUBTILE, BLOCK) // TOKENS
            x = load_entries(v, S, codes, row, code, j * 8 * B).to(T)
            x = tl.reshape(x, [B, JOINED, NEIGHBOURS, 8, 4, TOKENS // JOINED, JOINED, C])
            x = tl.reshape(tl.permute(x, (0, 3, 1, 4, 2, 6, 5, 7)), [8 * B, JOINED * SUBTILE, TOKENS // JOINED * C])
            x = unstack_last(x, 8 * B, JOINED * SUBTILE, TOKENS // JOINED * C)
            for i in tl.static_range(TOKENS // JOINED):
                for c in tl.static_range(C):
                    numbers = denormalize(x[i * C + c], v, S, tile_channels(j * C + c, S)[:, None])
                    w = operands[h * TOKENS // JOINED + i]
                    parts = replace_item(parts, c, tl.dot(numbers, w, parts[c], input_precision=PRECISION))
        new = new + parts
    return new


@triton.jit
def store(acc, out, l_i, C: tl.constexpr):
    """See `ValueReader`."""
    S: tl.constexpr = C.S
    M: tl.constexpr = C.M
    for i in tl.static_range(tile_count(C)):
        channel = tile_channels(i, S)
        mask = (tl.arange(0, M)[None, :] < C.GROUP) & (channel[:, None] >= 0)
        tl.store(out[None, :] + channel[:, None], acc[i] / l_i[None, :], mask=mask)


@triton.jit
def whole_queries(q, C: tl.constexpr):
    """The queries' pointer: they are read plane by plane, since registers hold scores and sums."""
    return q


@triton.jit
def first_channel(thread, C: tl.constexpr):
    """Channel of row 0 of accumulator tile 0 in each of 8 threads."""
    S: tl.constexpr = C.S
    return tile_channel(0, 0, thread, S)


KEYS = KeyReader("codebook.vector.keys", subtiles=True, table=nothing, queries=whole_queries, scores=scores)
VALUES = ValueReader(
    "codebook.vector.values",
    subtiles=True,
    table=nothing,
    init=init,
    prefetch=no_prefetch,
    accumulate=accumulate,
    store=store,
    tiles=tile_count,
    steps=tile_steps,
    channel=first_channel,
    crowded=True,
)

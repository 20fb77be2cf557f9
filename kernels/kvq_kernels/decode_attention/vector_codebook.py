"""Vector codebooks of 256 float16 entries: one load of 4, 8 or 16 bytes per code brings all numbers of its block.

`uniform.py` explains the layouts; `scalar_codebook.py` is the path for codebooks of single numbers.

A tile of the main loop is split into subtiles of 16 tokens so that the tokens of a code are in the same row of
different subtiles (see `subtile_tokens`): softmax does not depend on their order. With RoPE the key of token t of a
code is R(start) R(t) R(within) x, where `within` is the position of the code's first token in the tile: the first two
rotations are undone on the query, once for all codes.

Numbers are loaded by the threads that hold them as MMA operands: for keys 8 rows x 4 threads of neighbouring numbers,
for values 8 threads of neighbouring codes x 4 of neighbouring rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.layout_hints import load, load_once
from kvq_kernels.decode_attention.rope import STEP, half_pairs, load_cos_sin, unrotate_by_row
from kvq_kernels.decode_attention.spec import SideSpec, key_vector, needs_fence, value_vector

#: Tokens of a subtile: the inner dimension of a product p V.
SUBTILE = tl.constexpr(16)


@triton.constexpr_function
def vector_codebook_fits(spec: SideSpec, style: str, width: int, keys: bool) -> bool:
    """Whether this path reads a side: 256 entries of 2, 4 or 8 float16 numbers, whole planes, and no code with both
    channels of a rotated pair."""
    size = spec.tokens * spec.channels
    fits = spec.kind == "codebook" and spec.bits == 8 and spec.fp16_centroids and not spec.token_scaled
    fits = fits and size in (2, 4, 8) and spec.book_channels % spec.channels == 0
    if not keys:
        return fits and spec.dim % (8 * value_vector(spec) * spec.channels) == 0
    plane = 4 * key_vector(spec)
    if style == "none":
        return fits and spec.dim % plane == 0
    return fits and spec.dim % (2 * plane) == 0 and style == "half" and width // 2 % spec.channels == 0


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
def load_entries(side, S: tl.constexpr, codes, row, column, FIRST: tl.constexpr):
    """float16 [B, A, 8, 4, tokens, channels]: codebook entries of the codes in rows `row` [A, 8 or 1, 4 or 1, 1] and
    columns FIRST + `column` [1, 8 or 1, 4 or 1, B]."""
    C: tl.constexpr = S.channels
    SIZE: tl.constexpr = S.tokens * C
    # Codes leave the L1 cache to the codebooks.
    code = tl.permute(load_once(codes + row * (S.dim // C), FIRST + column), (3, 0, 1, 2))
    book = tl.permute((FIRST + column) * C // S.book_channels * 256, (3, 0, 1, 2))
    # Index whole entries (or halves): shift and add are then one instruction.
    if SIZE == 2:
        pointers = side[1].to(tl.pointer_type(tl.int32), bitcast=True) + book + code.to(tl.uint32)
    else:
        pointers = (
            side[1].to(tl.pointer_type(tl.int64), bitcast=True) + book * (SIZE // 4) + code.to(tl.uint32) * (SIZE // 4)
        )
    pointers = pointers.to(tl.pointer_type(tl.float16), bitcast=True)
    pointers = tl.multiple_of(pointers, (2 * SIZE, 2 * SIZE, 2 * SIZE, 2 * SIZE))
    x = load(pointers[:, :, :, :, None], tl.arange(0, SIZE)[None, None, None, None, :])
    return tl.reshape(x, [code.shape[0], code.shape[1], 8, 4, S.tokens, C])


@triton.jit
def unstack_last(x, A: tl.constexpr, B: tl.constexpr, COUNT: tl.constexpr):
    """x [A, B, COUNT] as a tuple of COUNT tensors [A, B]."""
    if COUNT == 1:
        return (tl.reshape(x, [A, B]),)
    elif COUNT == 2:
        return tl.split(x)
    elif COUNT == 4:
        even, odd = tl.split(tl.reshape(x, [A, B, 2, 2]))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        return x0, x1, x2, x3
    else:
        even, odd = tl.split(tl.reshape(x, [A, B, 4, 2]))
        x0, x2, x4, x6 = unstack_last(even, A, B, 4)
        x1, x3, x5, x7 = unstack_last(odd, A, B, 4)
        return x0, x1, x2, x3, x4, x5, x6, x7


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
def subtile_tokens(line, i: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    """Positions in a tile of the tokens in rows `line` of subtile i: every R blocks of tokens are BLOCK subtiles."""
    return line * BLOCK + (i // BLOCK * (R * BLOCK) + i % BLOCK)


@triton.jit
def denormalize(x, side, S: tl.constexpr, channel):
    """x std + mean where the side has them, else x."""
    if S.has_std:
        return tl.fma(x, tl.load(side[3] + channel).to(x.dtype), tl.load(side[2] + channel).to(x.dtype))
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
def vector_codebook_scores(
    q, k, S: tl.constexpr, begin, rope, start, STYLE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q . k of the tile that starts at packed token `begin`: L subtiles, float32 [M, SUBTILE] each."""
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
    codes = k[0] + begin // TOKENS * (D // C)
    tl.debug_barrier()  # keeps loop-invariant loads from being hoisted
    scores = ()
    for _ in tl.static_range(L):
        scores = scores + (tl.zeros([SUBTILE, M], tl.float32),)
    if STYLE == "none":
        for j in tl.static_range(D // PLANE):
            channel = j * PLANE + channel_in_plane
            a = query_operand(load(q + member * D, channel, mask, 0.0), T, M, V)
            for h in tl.static_range(L // TOKENS):
                fence(begin, needs_fence(S, True, h, j))
                row = subtile_tokens(line, h * TOKENS, SUBTILE, BLOCK) // TOKENS
                x = key_operands(decode_keys(k, S, codes, row, code, channel, T, j * PLANE // C), S)
                for t in tl.static_range(TOKENS):
                    s = tl.dot(x[t], a, scores[h * TOKENS + t], input_precision=PRECISION)
                    scores = replace_item(scores, h * TOKENS + t, s)
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
                    s = tl.dot(y1[t], unrotated[2 * t], scores[h * TOKENS + t], input_precision=PRECISION)
                    s = tl.dot(y2[t], unrotated[2 * t + 1], s, input_precision=PRECISION)
                    scores = replace_item(scores, h * TOKENS + t, s)
    qk = ()
    for i in tl.static_range(L):
        qk = qk + (tl.trans(scores[i]),)
    return qk


@triton.constexpr_function
def vector_tile_count(spec: SideSpec) -> int:
    """Accumulator tiles of values."""
    return spec.dim // (8 * value_vector(spec))


@triton.jit
def vector_tile_channels(i: tl.constexpr, S: tl.constexpr):
    """Channels of accumulator tile i: one of each of its codes."""
    row = tl.arange(0, 8 * value_vector(S))
    return vector_tile_channel(i, row // 8, row % 8, S)


@triton.jit
def vector_tile_channel(i: tl.constexpr, register, thread, S: tl.constexpr):
    """Channel of accumulator tile i in row `register` of each of 8 threads."""
    B: tl.constexpr = value_vector(S)
    C: tl.constexpr = S.channels
    return (thread * B + register + i // C * (8 * B)) * C + i % C


@triton.constexpr_function
def vector_tile_steps(index: int, spec: SideSpec) -> tuple[int, ...]:
    """Distances in channels from a thread's first row of tile 0 to each of its rows of tile `index`."""
    codes, channels = value_vector(spec), spec.channels
    return tuple((row + index // channels * 8 * codes) * channels + index % channels for row in range(codes))


@triton.jit
def vector_codebook_init(S: tl.constexpr, M: tl.constexpr):
    """Empty accumulator tiles."""
    acc = ()
    for _ in tl.static_range(vector_tile_count(S)):
        acc = acc + (tl.zeros([8 * value_vector(S), M], tl.float32),)
    return acc


@triton.jit
def vector_codebook_accumulate(
    acc, p, alpha, v, S: tl.constexpr, begin, M: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc alpha + p V: accumulator tiles float32 [channels of `vector_tile_channels`, M]."""
    C: tl.constexpr = S.channels
    TOKENS: tl.constexpr = S.tokens
    B: tl.constexpr = value_vector(S)
    JOINED: tl.constexpr = 2 if TOKENS > 1 else 1  # tokens of a code in one product
    NEIGHBOURS: tl.constexpr = 4 // JOINED
    thread, register = tl.arange(0, 4)[None, None, :, None], tl.arange(0, 4)[:, None, None, None]
    line = register // NEIGHBOURS * (4 * NEIGHBOURS) + thread * NEIGHBOURS + register % NEIGHBOURS
    code = tl.arange(0, 8)[None, :, None, None] * B + tl.arange(0, B)
    codes = v[0] + begin // TOKENS * (S.dim // C)
    tl.debug_barrier()
    operands = ()
    for i in tl.static_range(L // JOINED):
        w = p[i].to(T) if JOINED == 1 else tl.reshape(tl.join(p[2 * i].to(T), p[2 * i + 1].to(T)), [M, 2 * SUBTILE])
        operands = operands + (tl.trans(w),)
    new = ()
    for j in tl.static_range(vector_tile_count(S) // C):
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
                    numbers = denormalize(x[i * C + c], v, S, vector_tile_channels(j * C + c, S)[:, None])
                    w = operands[h * TOKENS // JOINED + i]
                    parts = replace_item(parts, c, tl.dot(numbers, w, parts[c], input_precision=PRECISION))
        new = new + parts
    return new


@triton.jit
def vector_codebook_store(acc, out, l_i, S: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr):
    """Store acc / l_i at the pointers `out` [M]."""
    for i in tl.static_range(vector_tile_count(S)):
        channel = vector_tile_channels(i, S)
        mask = (tl.arange(0, M)[None, :] < GROUP) & (channel[:, None] >= 0)
        tl.store(out[None, :] + channel[:, None], acc[i] / l_i[None, :], mask=mask)

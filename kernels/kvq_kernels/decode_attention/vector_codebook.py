"""Codebook entries fetched whole: one load of 4, 8 or 16 bytes per code brings all its numbers.

A tile of the main loop is dealt to tiles of 16 lines, so that the tokens of a code lie in the same line of different
ones (see `line_tokens`). With RoPE the key of token t of a code is R(start) R(t) R(within) x, where `within` is the
place of the code's first token in the tile: the first two turns are taken back from the query, once for all codes.

Numbers are loaded by the threads that hand them to the matrix unit: of the keys, 8 lines by 4 threads with numbers that
follow each other; of the values, 8 threads with codes that do by 4 with lines that do. Triton gives the last axis of a
load to a thread and those before it to threads, which is why tensors have four axes here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.layout_hints import load
from kvq_kernels.decode_attention.rope import STEP, pairs, turn, turn_back
from kvq_kernels.decode_attention.spec import fenced, get, key_width, value_codes

#: Of a tile of scores: what a product of weights and values sums over.
LINES = tl.constexpr(16)


@triton.constexpr_function
def gathers(spec, style, width, keys):
    """Whether a side can be read so: 256 entries of 2, 4 or 8 float16 numbers, whole planes, turned pairs in different
    codes."""
    size = spec.tokens * spec.channels
    fits = spec.kind == "codebook" and spec.bits == 8 and spec.half and not spec.token_scaled
    fits = fits and size in (2, 4, 8) and spec.share % spec.channels == 0
    if not keys:
        return fits and spec.dim % (8 * value_codes(spec) * spec.channels) == 0
    plane = 4 * key_width(spec)
    if style == "none":
        return fits and spec.dim % plane == 0
    return fits and spec.dim % (2 * plane) == 0 and style == "half" and width // 2 % spec.channels == 0


@triton.jit
def fence(begin, WANTED: tl.constexpr):
    """What is loaded before this place is used before more is loaded, else registers spill: ptxas schedules nothing
    over a loop, but puts the use of loads off over a barrier. The loop never runs: `begin` is not negative."""
    if WANTED:
        while begin < 0:
            tl.debug_barrier()
            begin *= begin


@triton.jit
def entries(side, S: tl.constexpr, codes, row, column, FIRST: tl.constexpr):
    """The entries of codes in rows `row` [A, 8 or 1, 4 or 1, 1] from `codes` on, columns FIRST + `column` [1, 8 or 1, 4
    or 1, B]: float16 [B, A, 8, 4, tokens, channels]."""
    C: tl.constexpr = get(S, "channels")
    SIZE: tl.constexpr = get(S, "tokens") * C
    code = tl.permute(load(codes + row * (get(S, "dim") // C), FIRST + column), (3, 0, 1, 2))
    book = tl.permute((FIRST + column) * C // get(S, "share") * 256, (3, 0, 1, 2))
    # As steps of a pointer to whole entries (or halves): the compiler then shifts and adds in one.
    if SIZE == 2:
        place = side[1].to(tl.pointer_type(tl.int32), bitcast=True) + book + code.to(tl.uint32)
    else:
        place = (
            side[1].to(tl.pointer_type(tl.int64), bitcast=True) + book * (SIZE // 4) + code.to(tl.uint32) * (SIZE // 4)
        )
    place = place.to(tl.pointer_type(tl.float16), bitcast=True)
    place = tl.multiple_of(place, (2 * SIZE, 2 * SIZE, 2 * SIZE, 2 * SIZE))
    x = load(place[:, :, :, :, None], tl.arange(0, SIZE)[None, None, None, None, :])
    return tl.reshape(x, [code.shape[0], code.shape[1], 8, 4, get(S, "tokens"), C])


@triton.jit
def apart(x, A: tl.constexpr, B: tl.constexpr, COUNT: tl.constexpr):
    """The COUNT tensors [A, B] that x [A, B, COUNT] consists of."""
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
        x0, x2, x4, x6 = apart(even, A, B, 4)
        x1, x3, x5, x7 = apart(odd, A, B, 4)
        return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def key_numbers(k, S: tl.constexpr, codes, row, column, channel, T: tl.constexpr, FIRST: tl.constexpr):
    """The numbers [2, 8, 4, V, tokens] of the codes, V to a thread, which belong to `channel` [1, 1, 4, V]."""
    V: tl.constexpr = key_width(S)
    x = entries(k, S, codes, row, column, FIRST).to(T)
    x = tl.reshape(tl.permute(x, (1, 2, 3, 0, 5, 4)), [2, 8, 4, V, get(S, "tokens")])
    return normalized(x, k, S, channel[:, :, :, :, None])


@triton.jit
def key_operands(y, S: tl.constexpr):
    """[2, 8, 4, V, tokens] as one side of products, for each of a code's tokens."""
    V: tl.constexpr = key_width(S)
    TOKENS: tl.constexpr = get(S, "tokens")
    y = tl.permute(tl.reshape(y, [2, 8, 4, V // 4, 4, TOKENS]), (0, 1, 3, 2, 4, 5))
    return apart(tl.reshape(y, [LINES, 4 * V, TOKENS]), LINES, 4 * V, TOKENS)


@triton.jit
def exchanged(tiles, i: tl.constexpr, tile):
    """The tuple `tiles` with `tile` as its i-th."""
    return tiles[:i] + (tile,) + tiles[i + 1 :]


@triton.jit
def line_tokens(line, i: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    """Places in a tile of the tokens in lines `line` of its i-th tile: runs of R blocks of tokens make BLOCK tiles."""
    return line * BLOCK + (i // BLOCK * (R * BLOCK) + i % BLOCK)


@triton.jit
def normalized(x, side, S: tl.constexpr, channel):
    """x std + mean, where the side has them."""
    if get(S, "scaled"):
        return tl.fma(x, tl.load(side[3] + channel).to(x.dtype), tl.load(side[2] + channel).to(x.dtype))
    else:
        return x


@triton.jit
def query_operand(a, T: tl.constexpr, M: tl.constexpr, V: tl.constexpr):
    """[1, M, 4, V] as the other side of products with keys."""
    a = tl.permute(tl.reshape(a.to(T), [M, 4, V // 4, 4]), (0, 2, 1, 3))
    return tl.trans(tl.reshape(a, [M, 4 * V]))


@triton.jit
def query_turned_back(
    q, rope, coarse, fine, pair, c1, c2, S: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """For each of a code's tokens the two sides of products with keys: channels c1 and c2 [1, 1, 4, V]."""
    D: tl.constexpr = get(S, "dim")
    V: tl.constexpr = key_width(S)
    member = tl.arange(0, M)[None, :, None, None]
    mine = (member < GROUP) & (pair >= 0)
    q1 = load(q + member * D, c1, mine, 0.0).to(tl.float32)
    q2 = load(q + member * D, c2, mine, 0.0).to(tl.float32)
    q1, q2 = turn_back(q1, q2, coarse, 0 * member, pair, WIDTH, D)
    q1, q2 = turn_back(q1, q2, fine, 0 * member, pair, WIDTH, D)
    back = (query_operand(q1, T, M, V), query_operand(q2, T, M, V))
    for t in tl.static_range(1, get(S, "tokens")):
        a1, a2 = turn_back(q1, q2, rope[1] + t * WIDTH, 0 * member, pair, WIDTH, D)
        back = back + (query_operand(a1, T, M, V), query_operand(a2, T, M, V))
    return back


@triton.jit
def gather_scores(
    q, k, S: tl.constexpr, begin, rope, start, STYLE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q . k of the tile that starts at packed token `begin`: L times float32 [M, LINES]."""
    D: tl.constexpr = get(S, "dim")
    C: tl.constexpr = get(S, "channels")
    TOKENS: tl.constexpr = get(S, "tokens")
    V: tl.constexpr = key_width(S)
    PLANE: tl.constexpr = 4 * V
    FENCED: tl.constexpr = get(S, "fenced")
    line = tl.arange(0, 2)[:, None, None, None] * 8 + tl.arange(0, 8)[None, :, None, None]
    member = tl.arange(0, M)[None, :, None, None]
    thread = tl.arange(0, 4)
    if FENCED:  # `begin` changes nothing, but keeps addresses from being made before the loop, to too many registers
        thread = tl.minimum(thread, 3 + begin)
    thread = thread[None, None, :, None]
    number, code = thread * V + tl.arange(0, V), thread * (V // C) + tl.arange(0, V // C)
    mine = (member < GROUP) & (number >= 0)
    codes = k[0] + begin // TOKENS * (D // C)
    tl.debug_barrier()  # else what is the same for all tiles is loaded before the loop
    scores = ()
    for _ in tl.static_range(L):
        scores = scores + (tl.zeros([LINES, M], tl.float32),)
    if STYLE == "none":
        for j in tl.static_range(D // PLANE):
            channel = j * PLANE + number
            a = query_operand(load(q + member * D, channel, mine, 0.0), T, M, V)
            for h in tl.static_range(L // TOKENS):
                fence(begin, fenced(S, True, h, j))
                row = line_tokens(line, h * TOKENS, LINES, BLOCK) // TOKENS
                x = key_operands(key_numbers(k, S, codes, row, code, channel, T, j * PLANE // C), S)
                for t in tl.static_range(TOKENS):
                    s = tl.dot(x[t], a, scores[h * TOKENS + t], input_precision=PRECISION)
                    scores = exchanged(scores, h * TOKENS + t, s)
    else:
        coarse = rope[0] + (start + begin) // STEP * WIDTH
        fine = rope[1] + (start + begin) % STEP * WIDTH
        for j in tl.static_range(D // PLANE // 2):
            pair = j * PLANE + number
            c1, c2 = pairs(pair, WIDTH // 2, D)
            if not FENCED:
                back = query_turned_back(q, rope, coarse, fine, pair, c1, c2, S, WIDTH, GROUP, M, T)
            for h in tl.static_range(L // TOKENS):
                fence(begin, fenced(S, True, h, j))
                within = line_tokens(line, h * TOKENS, LINES, BLOCK)
                row = within // TOKENS
                if WIDTH == D:
                    x1 = key_numbers(k, S, codes, row, code, c1, T, j * PLANE // C)
                    x2 = key_numbers(k, S, codes, row, code, c2, T, (j * PLANE + D // 2) // C)
                else:
                    first, second = pairs(j * PLANE // C + code, WIDTH // 2 // C, D // C)
                    x1 = key_numbers(k, S, codes, row, first, c1, T, 0)
                    x2 = key_numbers(k, S, codes, row, second, c2, T, 0)
                cos, sin = turn(rope[1 if tl.float32 == T else 2], within, pair, WIDTH, D)
                cos, sin = cos.to(T)[:, :, :, :, None], sin.to(T)[:, :, :, :, None]
                y1 = key_operands(tl.fma(x1, cos, -sin * x2), S)
                y2 = key_operands(tl.fma(x1, sin, cos * x2), S)
                if FENCED and h == 0:
                    fence(begin, L == TOKENS)  # of long codes, queries are turned when numbers have been
                    back = query_turned_back(q, rope, coarse, fine, pair, c1, c2, S, WIDTH, GROUP, M, T)
                for t in tl.static_range(TOKENS):
                    s = tl.dot(y1[t], back[2 * t], scores[h * TOKENS + t], input_precision=PRECISION)
                    s = tl.dot(y2[t], back[2 * t + 1], s, input_precision=PRECISION)
                    scores = exchanged(scores, h * TOKENS + t, s)
    found = ()
    for i in tl.static_range(L):
        found = found + (tl.trans(scores[i]),)
    return found


@triton.constexpr_function
def gathered_sums(spec):
    """How many sums of values there are."""
    return spec.dim // (8 * value_codes(spec))


@triton.jit
def gathered_channels(p: tl.constexpr, S: tl.constexpr):
    """The channels of the p-th sum: of each of its codes one."""
    row = tl.arange(0, 8 * value_codes(S))
    return gathered_channel(p, row // 8, row % 8, S)


@triton.jit
def gathered_channel(p: tl.constexpr, own, thread, S: tl.constexpr):
    """The channel of the p-th sum in the `own`-th row that each of 8 threads has."""
    B: tl.constexpr = value_codes(S)
    C: tl.constexpr = get(S, "channels")
    return (thread * B + own + p // C * (8 * B)) * C + p % C


@triton.constexpr_function
def gathered_steps(p, spec):
    """Channels from a thread's first row of the first sum to its rows of the p-th."""
    codes, channels = value_codes(spec), spec.channels
    return tuple((own + p // channels * 8 * codes) * channels + p % channels for own in range(codes))


@triton.jit
def gather_nothing(S: tl.constexpr, M: tl.constexpr):
    """`acc` of no tokens."""
    acc = ()
    for _ in tl.static_range(gathered_sums(S)):
        acc = acc + (tl.zeros([8 * value_codes(S), M], tl.float32),)
    return acc


@triton.jit
def gather_values(
    acc, weights, shrink, v, S: tl.constexpr, begin, M: tl.constexpr, L: tl.constexpr, BLOCK: tl.constexpr,
    T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc shrink + weights V: for each p float32 [channels, M] of `gathered_channels`."""
    C: tl.constexpr = get(S, "channels")
    TOKENS: tl.constexpr = get(S, "tokens")
    B: tl.constexpr = value_codes(S)
    P: tl.constexpr = 2 if TOKENS > 1 else 1  # tokens of a code that one product sums over
    BESIDE: tl.constexpr = 4 // P
    thread, own = tl.arange(0, 4)[None, None, :, None], tl.arange(0, 4)[:, None, None, None]
    line = own // BESIDE * (4 * BESIDE) + thread * BESIDE + own % BESIDE
    code = tl.arange(0, 8)[None, :, None, None] * B + tl.arange(0, B)
    codes = v[0] + begin // TOKENS * (get(S, "dim") // C)
    tl.debug_barrier()
    operands = ()
    for i in tl.static_range(L // P):
        if P == 1:
            w = weights[i].to(T)
        else:
            w = tl.reshape(tl.join(weights[2 * i].to(T), weights[2 * i + 1].to(T)), [M, 2 * LINES])
        operands = operands + (tl.trans(w),)
    new = ()
    for j in tl.static_range(gathered_sums(S) // C):
        parts = ()
        for c in tl.static_range(C):
            parts = parts + (acc[j * C + c] * shrink[None, :],)
        for h in tl.static_range(L // TOKENS):
            fence(begin, fenced(S, False, h, j))
            row = line_tokens(line, h * TOKENS, LINES, BLOCK) // TOKENS
            x = entries(v, S, codes, row, code, j * 8 * B).to(T)
            x = tl.reshape(x, [B, P, BESIDE, 8, 4, TOKENS // P, P, C])
            x = tl.reshape(tl.permute(x, (0, 3, 1, 4, 2, 6, 5, 7)), [8 * B, P * LINES, TOKENS // P * C])
            x = apart(x, 8 * B, P * LINES, TOKENS // P * C)
            for i in tl.static_range(TOKENS // P):
                for c in tl.static_range(C):
                    one = normalized(x[i * C + c], v, S, gathered_channels(j * C + c, S)[:, None])
                    w = operands[h * TOKENS // P + i]
                    parts = exchanged(parts, c, tl.dot(one, w, parts[c], input_precision=PRECISION))
        new = new + parts
    return new


@triton.jit
def gather_store(acc, out, total, S: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr):
    """acc / total to `out` [M] pointers."""
    for p in tl.static_range(gathered_sums(S)):
        channel = gathered_channels(p, S)
        mine = (tl.arange(0, M)[None, :] < GROUP) & (channel[:, None] >= 0)
        tl.store(out[None, :] + channel[:, None], acc[p] / total[None, :], mask=mine)

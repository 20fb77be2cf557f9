"""Scalar codes of a codebook that all channels share, which lies in registers (see `permute.py`).

As in `gather.py` numbers are made by the threads that hand them to the matrix unit: of keys 8 lines by 4 threads, of
values 8 threads with words by 4 with lines. Two numbers that lie side by side in a register are those of two words (of
one token, or of one place in two tokens), so that their places in rotations and sums lie side by side, too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.byte_permute import fields, one_word, two_words
from kvq_kernels.decode_attention.layout_hints import load, load_fields
from kvq_kernels.decode_attention.rope import STEP, turned_back
from kvq_kernels.decode_attention.spec import get, row_width
from kvq_kernels.decode_attention.vector_codebook import line_tokens


@triton.constexpr_function
def looks_up(spec, style, width, type, keys):
    """Whether a side can be read so: a codebook of at most 16 entries for all channels, words that 4 threads share
    evenly, turned pairs in the same words."""
    fits = spec.kind == "codebook" and spec.nvidia and spec.tokens * spec.channels == 1
    fits = fits and spec.share == spec.dim and spec.bits <= 4 and type == tl.float16
    fits = fits and spec.words in (4, 8, 16, 32) and spec.words * fields(spec) == spec.dim
    if not keys:
        return fits and not spec.scaled
    return fits and not spec.token_scaled and (style == "none" or style == "half" and width % (2 * spec.words) == 0)


@triton.jit
def key_words(S: tl.constexpr):
    """Words of a line that each of 4 threads has, [1, 1, 4, V]. Backwards: one word per thread must not look like a run
    of words, all of which the compiler would give to one thread."""
    V: tl.constexpr = get(S, "words") // 4
    return (3 - tl.arange(0, 4))[None, None, :, None] * V + tl.arange(0, V)[None, None, None, :]


@triton.jit
def key_fields(codes, table, S: tl.constexpr, line):
    """float16 [A, 8, 4, V] for each field: the numbers of lines `line` [A, 8, 1, 1]."""
    A: tl.constexpr = line.shape[0]
    W: tl.constexpr = get(S, "words")
    V: tl.constexpr = W // 4
    row = codes + line * row_width(S)
    low = load(row, key_words(S))
    high = low
    if get(S, "bits") == 3:
        thread = (3 - tl.arange(0, 4))[None, None, :, None]
        high = load(row, W + thread % 2 * V + tl.arange(0, V)[None, None, None, :]) >> (thread // 2)
    if V == 1:
        return one_word(low, high, table, S)
    else:
        a, b = tl.split(tl.reshape(low, [A, 8, 4, V // 2, 2]))
        ah, bh = tl.split(tl.reshape(high, [A, 8, 4, V // 2, 2]))
        numbers = ()
        x = two_words(a, b, ah, bh, table, S, 0, 2)
        for f in tl.static_range(fields(S)):
            numbers = numbers + (tl.reshape(x[f], [A, 8, 4, V]),)
        return numbers


@triton.constexpr_function
def together(spec):
    """Fields whose numbers make one product with queries."""
    return max(1, 16 // spec.words)


@triton.constexpr_function
def turned_fields(spec, style, width):
    """Pairs of fields that are turned: each with the one that lies so many fields further."""
    return 0 if style == "none" else width // 2 // spec.words


@triton.constexpr_function
def partner(spec, turned, i, second):
    """The first or second field of pair i: those of the turned ones, then what is left."""
    if i < turned:
        return i + turned if second else i
    return i + fields(spec) // 2 if second else i + turned


@triton.jit
def operand(parts, first: tl.constexpr, S: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """[A B, 16 or 32]: the `together` tensors [A, B, 4, V] from `first` on as one side of a product."""
    V: tl.constexpr = get(S, "words") // 4
    G: tl.constexpr = together(S)
    x = parts[first]
    if G == 1:
        x = tl.permute(tl.reshape(x, [A, B, 4, V // 4, 4]), (0, 1, 3, 2, 4))
    elif G == 2:
        x = tl.permute(tl.join(x, parts[first + 1]), (0, 1, 2, 4, 3))
    else:
        x = tl.join(tl.join(x, parts[first + 2]), tl.join(parts[first + 1], parts[first + 3]))  # as `one_word` pairs
        x = tl.permute(x, (0, 1, 2, 3, 5, 4))
    return tl.reshape(x, [A * B, 4 * V * G])


@triton.jit
def tile_queries(
    q, S: tl.constexpr, rope, position, STYLE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr,
    T: tl.constexpr,
):  # fmt: skip
    """Queries turned back by `position`, as the other side of products with the first and second fields of pairs."""
    D: tl.constexpr = get(S, "dim")
    W: tl.constexpr = get(S, "words")
    TURNED: tl.constexpr = turned_fields(S, STYLE, WIDTH)
    member, word = tl.arange(0, M)[None, :, None, None], key_words(S)
    mine = (member < GROUP) & (word >= 0)
    a = load_fields(q + member * D, word, 0, fields(S), W, mine)
    if TURNED > 0:
        coarse, fine = rope[0] + position // STEP * WIDTH + 0 * member, rope[1] + position % STEP * WIDTH + 0 * member
        cos1, sin1 = load_fields(coarse, word, 0, TURNED, W), load_fields(coarse + WIDTH // 2, word, 0, TURNED, W)
        cos2, sin2 = load_fields(fine, word, 0, TURNED, W), load_fields(fine + WIDTH // 2, word, 0, TURNED, W)
    first, second = (), ()
    for i in tl.static_range(fields(S) // 2):
        q1 = a[partner(S, TURNED, i, False)].to(tl.float32)
        q2 = a[partner(S, TURNED, i, True)].to(tl.float32)
        if i < TURNED:
            q1, q2 = turned_back(q1, q2, cos1[i], sin1[i])
            q1, q2 = turned_back(q1, q2, cos2[i], sin2[i])
        first, second = first + (q1.to(T),), second + (q2.to(T),)
    operands = ()
    for i in tl.static_range(0, fields(S) // 2, together(S)):
        operands = operands + (tl.trans(operand(first, i, S, 1, M)), tl.trans(operand(second, i, S, 1, M)))
    return operands


@triton.jit
def lookup_scores(
    q, table, k, S: tl.constexpr, begin, rope, start, STYLE: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, L: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q . k of the tile that starts at packed token `begin`: L times float32 [M, R]."""
    W: tl.constexpr = get(S, "words")
    TURNED: tl.constexpr = turned_fields(S, STYLE, WIDTH)
    line = tl.arange(0, R // 8)[:, None, None, None] * 8 + tl.arange(0, 8)[None, :, None, None]
    word = key_words(S)
    codes = k[0] + begin * row_width(S)
    tl.debug_barrier()  # else what is the same for all tiles is loaded before the loop, to more registers than are
    queries = tile_queries(q, S, rope, start + begin, STYLE, WIDTH, GROUP, M, T)
    if get(S, "scaled"):
        alike = tl.zeros([1, 8, 1, 1], tl.int32)  # for all lines
        std, mean = load_fields(k[3] + alike, word, 0, fields(S), W), load_fields(k[2] + alike, word, 0, fields(S), W)
    AT_ONCE: tl.constexpr = 4 if get(S, "slots") > 0 else TURNED  # beside outliers, registers are too few for more
    found = ()
    for i in tl.static_range(L):
        within = line_tokens(line, i, R, BLOCK)
        x = key_fields(codes, table, S, within)
        if get(S, "scaled"):
            scaled = ()
            for f in tl.static_range(fields(S)):
                scaled = scaled + (tl.fma(x[f], std[f].to(T), mean[f].to(T)),)
            x = scaled
        row = rope[2] + within * WIDTH if TURNED > 0 else 0
        first, second = (), ()
        for j in tl.static_range(fields(S) // 2):
            x1, x2 = x[partner(S, TURNED, j, False)], x[partner(S, TURNED, j, True)]
            if j < TURNED:
                if j % AT_ONCE == 0:
                    cos = load_fields(row, word, j, min(AT_ONCE, TURNED - j), W)
                    sin = load_fields(row + WIDTH // 2, word, j, min(AT_ONCE, TURNED - j), W)
                cosine, sine = cos[j % AT_ONCE], sin[j % AT_ONCE]
                x1, x2 = tl.fma(x1, cosine, -(sine * x2)), tl.fma(x1, sine, cosine * x2)
            first, second = first + (x1,), second + (x2,)
        s = tl.zeros([R, M], tl.float32)
        for j in tl.static_range(0, fields(S) // 2, together(S)):
            a1, a2 = operand(first, j, S, R // 8, 8), operand(second, j, S, R // 8, 8)
            s = tl.dot(a1, queries[2 * j // together(S)], s, input_precision=PRECISION)
            s = tl.dot(a2, queries[2 * j // together(S) + 1], s, input_precision=PRECISION)
        found = found + (tl.trans(s),)
    return found


@triton.constexpr_function
def looked_up_sums(spec):
    """How many sums of values there are: of 16 or 32 channels."""
    return spec.dim // max(16, spec.words)


@triton.jit
def looked_up_channels(p: tl.constexpr, S: tl.constexpr):
    """The channels of the p-th sum."""
    row = tl.arange(0, max(16, get(S, "words")))
    return looked_up_channel(p, row // 8, row % 8, S)


@triton.jit
def looked_up_channel(p: tl.constexpr, own, thread, S: tl.constexpr):
    """The channel of the p-th sum in the `own`-th row that each of 8 threads has."""
    W: tl.constexpr = get(S, "words")
    B: tl.constexpr = max(1, W // 8)
    if B > 1:
        return p * W + (7 - thread) * B + own
    else:
        field = 2 * p + own + thread // W * (fields(S) // 2)
        return field * W + (7 - thread) % W


@triton.constexpr_function
def looked_up_steps(p, spec):
    """Channels from a thread's first row of the first sum to its rows of the p-th."""
    if spec.words > 8:
        return tuple(p * spec.words + own for own in range(spec.words // 8))
    return tuple((2 * p + own) * spec.words for own in range(2))


@triton.jit
def lookup_nothing(S: tl.constexpr, M: tl.constexpr):
    """`acc` of no tokens."""
    sums = ()
    for _ in tl.static_range(looked_up_sums(S)):
        sums = sums + (tl.zeros([max(16, get(S, "words")), M], tl.float32),)
    return sums, tl.zeros([M], tl.float32)


@triton.jit
def value_fields(codes, table, S: tl.constexpr, begin, i: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    """float16 [R / 8, 8, 4, B, 2] for each field: the numbers of the i-th tile of lines of a tile that starts at
    `begin`; line 16 n + 4 t + 2 h + l is at [2 n + h, :, t, :, l]. Of 4 words, 8 threads have half a word each."""
    W: tl.constexpr = get(S, "words")
    B: tl.constexpr = max(1, W // 8)
    own = tl.arange(0, R // 4)[:, None, None, None]
    line = own // 4 * 16 + tl.arange(0, 4)[None, None, :, None] * 4 + own % 4
    thread = tl.arange(0, 8)[None, :, None, None]
    word, beside = (7 - thread) % (W // B) * B, tl.arange(0, B)[None, None, None, :]
    row = codes + (begin + line_tokens(line, i, R, BLOCK)) * row_width(S)
    a, b = _halves(load(row, word + beside), R, B)
    ah, bh = a, b
    if get(S, "bits") == 3:
        high = load(row, W + (7 - thread) % (W // B // 2) * B + beside) >> (word // (W // 2))
        ah, bh = _halves(high, R, B)
    if W == 4:
        return two_words(a, b, ah, bh, table, S, thread // 4, 1)
    else:
        return two_words(a, b, ah, bh, table, S, 0, 2)


@triton.jit
def _halves(x, R: tl.constexpr, B: tl.constexpr):
    """Of [R / 8 of 2, 8, 4, B] the two [R / 8, 8, 4, B]."""
    return tl.split(tl.permute(tl.reshape(x, [R // 8, 2, 8, 4, B]), (0, 2, 3, 4, 1)))


@triton.jit
def lookup_values(
    acc, table, weights, shrink, v, S: tl.constexpr, begin, M: tl.constexpr, L: tl.constexpr, R: tl.constexpr,
    BLOCK: tl.constexpr, T: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc shrink + weights V: float32 [channels, M] of `looked_up_channels` for each p, and, of tokens' zero-points,
    what is the same for all channels, [M]: sum_t p (s c + z) = sum_t (p s) c + sum_t p z."""
    W: tl.constexpr = get(S, "words")
    sums, offset = acc
    tl.debug_barrier()  # else it is begun while keys still fill the registers
    shifts = tl.zeros([M, R], tl.float32)
    parts = ()
    for p in tl.static_range(looked_up_sums(S)):
        parts = parts + (sums[p] * shrink[None, :],)
    for i in tl.static_range(L):
        w = weights[i]
        if get(S, "token_scaled"):
            token = begin + line_tokens(tl.arange(0, R), i, R, BLOCK)
            shifts += w * tl.load(v[5] + token).to(tl.float32)[None, :]
            w *= tl.load(v[4] + token).to(tl.float32)[None, :]
        w = tl.trans(w.to(T))
        x = value_fields(v[0], table, S, begin, i, R, BLOCK)
        new = ()
        for p in tl.static_range(looked_up_sums(S)):
            if W <= 8:
                one = tl.reshape(tl.join(x[2 * p], x[2 * p + 1]), [R // 16, 2, 8, 4, 2, 2])
                one = tl.permute(one, (5, 2, 0, 3, 1, 4))
            else:
                one = tl.permute(tl.reshape(x[p], [R // 16, 2, 8, 4, W // 8, 2]), (4, 2, 0, 3, 1, 5))
            one = tl.reshape(one, [max(16, W), R])
            new = new + (tl.dot(one, w, parts[p], input_precision=PRECISION),)
        parts = new
    return parts, offset * shrink + tl.sum(shifts, axis=1)


@triton.jit
def lookup_store(acc, out, total, S: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr):
    """acc / total to `out` [M] pointers."""
    sums, offset = acc
    for p in tl.static_range(looked_up_sums(S)):
        channel = looked_up_channels(p, S)
        mine = (tl.arange(0, M)[None, :] < GROUP) & (channel[:, None] >= 0)
        tl.store(out[None, :] + channel[:, None], (sums[p] + offset[None, :]) / total[None, :], mask=mine)

"""Both products over packed numbers; a program takes a run of tokens of one kv head, for all of its query heads.

Tokens beyond the last are read as the last one and left out of what is stored, so that no load of codes has a mask.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.fold import (
    UNIT,
    element_bits,
    field_group,
    field_unit,
    fields,
    fold_queries,
    load_elements,
    plane,
    plane_channels,
    width,
)
from kvq_kernels.decode_attention.main import load_queries
from kvq_kernels.decode_attention.number import at_head, number
from kvq_kernels.decode_attention.spec import get, plane_count
from kvq_kernels.quantized_matvec.signs import (
    begins_groups,
    first_bit,
    folds,
    of_group,
    scale_zero_sign,
    shifts_zero,
    signed,
    signs_of_tokens,
)

#: P is multiplied by this before it is rounded to float16, which has few digits below 2^-14.
LIFT = tl.constexpr(256.0)


@triton.jit
def _run(tokens, N: tl.constexpr):
    """Tiles [first, last) of this program."""
    tiles = tl.cdiv(tokens, N)
    each = tl.cdiv(tiles, tl.num_programs(0))
    first = tl.minimum(tl.program_id(0) * each, tiles)
    return first, tl.minimum(first + each, tiles)


@triton.jit
def scores_kernel(
    query,  # [B, Q, D]
    out,  # [B, Q, T]
    keys,  # tuple of pointers, see `number.py`
    strides,
    tokens,
    S: tl.constexpr,  # SideSpec
    GROUP: tl.constexpr,  # query heads of a kv head
    M: tl.constexpr,  # that, as a power of two
    N: tl.constexpr,  # tokens of a tile
    E: tl.constexpr,  # columns of a plane, where tiles are not folded
    T: tl.constexpr,  # type that numbers are multiplied in
    PRECISION: tl.constexpr,  # of float32 products
    STAGES: tl.constexpr,
):
    """S = Q K^T (Eq. 3)."""
    head, row = tl.program_id(1), tl.program_id(2)
    k = at_head(keys, strides, S, row, head)
    first_query = (row.to(tl.int64) * tl.num_programs(1) + head) * GROUP
    q = query + first_query * get(S, "dim")
    member, line = tl.arange(0, M), tl.arange(0, N)
    places = out + (first_query + member)[:, None] * tokens
    FOLD: tl.constexpr = folds(S, N)
    queries = fold_queries(q, S, GROUP, M, T) if FOLD else load_queries(q, S, "none", 0, GROUP, M, E)
    first, last = _run(tokens, N)
    for tile in tl.range(first, last, num_stages=STAGES):
        here = tile * N + line
        token = tl.minimum(here, tokens - 1)
        if not FOLD:
            scores = _plain_scores(queries, k, S, token, M, N, E, T, PRECISION)
        elif get(S, "axis") == "channel":
            scores = _scores_of_channels(queries[0], k, S, tile, token, M, N, T, PRECISION)
        else:
            scores = _scores_of_tokens(queries, k, S, token, M, N, T, PRECISION)
        mine = (member < GROUP)[:, None] & (here < tokens)[None, :]
        tl.store(places + here[None, :], scores.to(out.dtype.element_ty), mask=mine)


@triton.jit
def _plain_scores(
    queries, k, S: tl.constexpr, token, M: tl.constexpr, N: tl.constexpr, E: tl.constexpr, T: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    scores = tl.zeros([M, N], tl.float32)
    for j in tl.static_range(plane_count(S, E)):
        channel = (j * E + tl.arange(0, E))[None, :]
        x = number(k, S, token[:, None], channel, channel < get(S, "dim"))
        scores = tl.dot(queries[j].to(T), tl.trans(x.to(T)), scores, input_precision=PREC)
    return scores


@triton.jit
def _scores_of_channels(
    planes, k, S: tl.constexpr, tile, token, M: tl.constexpr, N: tl.constexpr, T: tl.constexpr, PREC: tl.constexpr
):
    """q . (s c + z) = (q s) . c + q . z, with one s and z per channel of the tile."""
    low, high = load_elements(k[0], S, True, token)
    scores = tl.zeros([N, M], tl.float32)
    offset = tl.zeros([M, width(S, True)], tl.float32)
    base = (tile * N // get(S, "group")) * get(S, "dim")
    for f in tl.static_range(fields(S, True)):
        channel = plane_channels(S, True, f)
        s, z, word = scale_zero_sign(k, S, base + channel, channel < get(S, "dim"))
        x = _plane_of_channels(low, high, word, token, S, f)
        scores = tl.dot(x.to(T), tl.trans(planes[f] * s.to(T)[None, :]), scores, input_precision=PREC)
        if shifts_zero(S):
            offset += planes[f].to(tl.float32) * (z / field_unit(S, f))[None, :]
    scores *= UNIT
    if shifts_zero(S):
        scores += tl.sum(offset, axis=1)[None, :]
    return tl.trans(scores)


@triton.jit
def _plane_of_channels(low, high, word, token, S: tl.constexpr, field: tl.constexpr):
    """A plane [N, width] whose groups are per channel. word: of their sign bits [width]."""
    x = plane(low, high, S, field)
    if get(S, "sign_bits") > 0:
        member = token % get(S, "group")
        x = signed(x, word[None, :] >> member[:, None].to(word.dtype), 0)
    return x


@triton.jit
def _scores_of_tokens(
    queries, k, S: tl.constexpr, token, M: tl.constexpr, N: tl.constexpr, T: tl.constexpr, PREC: tl.constexpr
):
    """q . (s c + z) = sum over groups of s (q_g . c_g) + z sum(q_g), with one s and z per token and group."""
    low, high = load_elements(k[0], S, True, token)
    planes, sums = queries
    SUBS: tl.constexpr = 32 // element_bits(S, True)
    GROUPS: tl.constexpr = get(S, "dim") // get(S, "group")
    scales, words, parts = (), (), ()
    scores = tl.zeros([N, M], tl.float32)
    for g in tl.static_range(GROUPS):
        s, z, word = scale_zero_sign(k, S, token * GROUPS + g, token >= 0)
        scales, words, parts = scales + (s,), words + (word,), parts + (tl.zeros([N, M], tl.float32),)
        if shifts_zero(S):
            scores += sums[g][None, :] * z[:, None]
    signs = low
    for f in tl.static_range(fields(S, True)):
        x = plane(low, high, S, f)
        if get(S, "sign_bits") > 0:
            if begins_groups(S, f, True):
                signs = signs_of_tokens(words, S, True, f)
            x = signed(x, signs, first_bit(S, f, 0, True))
        new = ()
        for g in tl.static_range(GROUPS):
            part = parts[g]
            for i in tl.static_range(SUBS):
                if of_group(S, f, i, True, g):
                    a = tl.trans(planes[i * fields(S, True) + f])
                    part = tl.dot(x.to(T), a, part, input_precision=PREC)
            new = new + (part,)
        parts = new
    for g in tl.static_range(GROUPS):
        scores += parts[g] * (scales[g] * UNIT)[:, None]
    return tl.trans(scores)


@triton.jit
def outputs_kernel(
    weights,  # [B, Q, T]
    partial,  # [programs of a head, B, Q, D]: the sums of each run of tokens
    values,
    strides,
    tokens,
    S: tl.constexpr,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    E: tl.constexpr,
    T: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """O = P V (Eq. 5)."""
    head, row = tl.program_id(1), tl.program_id(2)
    v = at_head(values, strides, S, row, head)
    queries = tl.num_programs(1) * GROUP
    first_query = row.to(tl.int64) * queries + head * GROUP
    member, line = tl.arange(0, M), tl.arange(0, N)
    places = weights + (first_query + member)[:, None] * tokens
    FOLD: tl.constexpr = folds(S, N)
    # Elements of 16 bits where groups let them: twice the channels per product, as its rows.
    WIDE: tl.constexpr = get(S, "axis") == "channel"
    FIELDS: tl.constexpr = fields(S, WIDE) if FOLD else plane_count(S, E)
    WIDTH: tl.constexpr = width(S, WIDE) if FOLD else E
    GROUPS: tl.constexpr = get(S, "dim") // get(S, "group") if FOLD and get(S, "axis") == "token" else 0
    acc, offsets = (), ()
    for _ in tl.static_range(FIELDS):
        acc = acc + (tl.zeros([WIDTH, M] if FOLD and WIDE else [M, WIDTH], tl.float32),)
    for _ in tl.static_range(GROUPS if shifts_zero(S) else 0):
        offsets = offsets + (tl.zeros([M], tl.float32),)
    first, last = _run(tokens, N)
    for tile in tl.range(first, last, num_stages=STAGES):
        here = tile * N + line
        token = tl.minimum(here, tokens - 1)
        mine = (member < GROUP)[:, None] & (here < tokens)[None, :]
        p = tl.load(places + here[None, :], mask=mine, other=0.0).to(tl.float32) * LIFT
        if not FOLD:
            acc = _plain_outputs(acc, p, v, S, token, E, T, PRECISION)
        elif get(S, "axis") == "channel":
            acc = _outputs_of_channels(acc, p, v, S, tile, token, N, T, PRECISION)
        else:
            acc, offsets = _outputs_of_tokens(acc, offsets, p, v, S, token, T, PRECISION)
    run = tl.program_id(0).to(tl.int64) * tl.num_programs(2) * queries
    sums = partial + (run + first_query + member)[:, None] * get(S, "dim")
    for f in tl.static_range(FIELDS):
        x = tl.trans(acc[f]) if FOLD and WIDE else acc[f]
        if FOLD:
            channel = plane_channels(S, WIDE, f)[None, :]
            x *= field_unit(S, f) * UNIT
            if GROUPS > 0 and shifts_zero(S):
                x += offsets[field_group(S, f, 0, False)][:, None]
        else:
            channel = (f * E + tl.arange(0, E))[None, :]
        mine = (member < GROUP)[:, None] & (channel < get(S, "dim"))
        tl.store(sums + channel, (x / LIFT).to(partial.dtype.element_ty), mask=mine)


@triton.jit
def _plain_outputs(acc, p, v, S: tl.constexpr, token, E: tl.constexpr, T: tl.constexpr, PREC: tl.constexpr):
    new = ()
    for j in tl.static_range(plane_count(S, E)):
        channel = (j * E + tl.arange(0, E))[None, :]
        x = number(v, S, token[:, None], channel, channel < get(S, "dim"))
        new = new + (tl.dot(p.to(T), x.to(T), acc[j], input_precision=PREC),)
    return new


@triton.jit
def _outputs_of_channels(acc, p, v, S: tl.constexpr, tile, token, N: tl.constexpr, T: tl.constexpr, PREC: tl.constexpr):
    """sum_t p (s c + z) = s (sum_t p c) + z sum_t p, with one s and z per channel of the tile; [width, M], less
    field_unit UNIT."""
    low, high = load_elements(v[0], S, True, token)
    base = (tile * N // get(S, "group")) * get(S, "dim")
    p = tl.trans(p.to(T))
    mass = tl.sum(p.to(tl.float32), axis=0)[None, :]
    new = ()
    for f in tl.static_range(fields(S, True)):
        channel = plane_channels(S, True, f)
        s, z, word = scale_zero_sign(v, S, base + channel, channel < get(S, "dim"))
        x = _plane_of_channels(low, high, word, token, S, f)
        sums = acc[f] + tl.dot(tl.trans(x.to(T)), p, input_precision=PREC) * s[:, None]
        if shifts_zero(S):
            sums += mass * (z / (field_unit(S, f) * UNIT))[:, None]
        new = new + (sums,)
    return new


@triton.jit
def _outputs_of_tokens(acc, offsets, p, v, S: tl.constexpr, token, T: tl.constexpr, PREC: tl.constexpr):
    """sum_t p (s c + z) = sum_t (p s) c + sum_t p z, with one s and z per token and group of channels."""
    low, high = load_elements(v[0], S, False, token)
    GROUPS: tl.constexpr = get(S, "dim") // get(S, "group")
    scaled, words, sums, new = (), (), (), ()
    for g in tl.static_range(GROUPS):
        s, z, word = scale_zero_sign(v, S, token * GROUPS + g, token >= 0)
        scaled, words = scaled + ((p * s[None, :]).to(T),), words + (word,)
        if shifts_zero(S):
            sums = sums + (offsets[g] + tl.sum(p * z[None, :], axis=1),)
    signs = low
    for f in tl.static_range(fields(S, False)):
        x = plane(low, high, S, f)
        if get(S, "sign_bits") > 0:
            if begins_groups(S, f, False):
                signs = signs_of_tokens(words, S, False, f)
            x = signed(x, signs, first_bit(S, f, 0, False))
        p_scaled = scaled[field_group(S, f, 0, False)]
        new = new + (tl.dot(p_scaled, x.to(T), acc[f], input_precision=PREC),)
    return new, sums


@triton.jit
def sum_kernel(partial, out, runs, count, N: tl.constexpr):
    """out [count] = sum over the first dimension of partial [runs, count]."""
    at = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
    total = tl.zeros([N], tl.float32)
    for _ in tl.range(0, runs):
        total += tl.load(partial + at, mask=at < count, other=0.0)
        partial += count
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < count)

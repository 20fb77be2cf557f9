"""Uniform codes multiplied as they are: scales and zero-points are folded into queries, weights, scores or sums.

A token's words are read as elements of 8, 16 or 32 bits; field f of all elements is a *plane* of channels. One mask
makes float16 numbers of it: code << r, as the low bits of a float16, is the subnormal number code 2^(r - 24).
No number is converted or added to. r is the field's own place where that lies below bit 10: no shift either.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.spec import get, padded, row_width

#: What the codes are too small by.
UNIT = tl.constexpr(16777216.0)


@triton.constexpr_function
def folds(spec, rope_style, tokens, keys):
    """Whether a side can be read so: plain scales, one per channel of a tile or one per token of a plane."""
    plain = spec.kind == "uniform" and not spec.sign_bits and not spec.hybrid and not spec.slots
    if not plain or (keys and rope_style != "none") or (spec.bits == 3 and spec.dim % 32):
        return False
    if spec.axis == "channel":
        return spec.group % tokens == 0
    return spec.group % spec.words == 0 and spec.dim * spec.bits % 32 == 0


@triton.constexpr_function
def element_bits(spec, keys):
    """Keys need 16 elements per token, the least inner size of a product; of values a plane is to have one group."""
    if not keys:
        return 32
    return next((size for size in (32, 16) if spec.words * 32 // size >= 16), 8)


@triton.constexpr_function
def fields(spec, keys):
    return element_bits(spec, keys) // (2 if spec.bits == 3 else spec.bits)


@triton.constexpr_function
def width(spec, keys):
    """Elements of a token, padded."""
    count = spec.words * 32 // element_bits(spec, keys)
    return max(16 if keys else 8, triton.next_power_of_2(count))


@triton.constexpr_function
def field_shift(spec, field):
    """How far elements are shifted for a field; the rest of its place is `field_place`."""
    bits = 2 if spec.bits == 3 else spec.bits
    per_window = 1 if spec.bits == 3 else 10 // bits
    return field // per_window * per_window * bits


@triton.constexpr_function
def field_place(spec, field):
    return field * (2 if spec.bits == 3 else spec.bits) - field_shift(spec, field)


@triton.constexpr_function
def field_unit(spec, field):
    """What the numbers of a plane are to be multiplied by, less `UNIT`."""
    return 2.0 ** -field_place(spec, field)


@triton.constexpr_function
def field_group(spec, field, sub, keys):
    """The group of channels of a plane's elements number `sub` of their words (axis "token")."""
    return (field + fields(spec, keys) * sub) * spec.words // spec.group


@triton.jit
def plane_channels(S: tl.constexpr, KEYS: tl.constexpr, field):
    """Channel of each element of a plane, at least D where there is none: int32 [width]."""
    SUBS: tl.constexpr = 32 // element_bits(S, KEYS)
    element = tl.arange(0, width(S, KEYS))
    word = element // SUBS
    channel = (field + fields(S, KEYS) * (element % SUBS)) * get(S, "words") + word
    return tl.where(word < get(S, "words"), channel, get(S, "dim"))


@triton.jit
def load_elements(codes, S: tl.constexpr, KEYS: tl.constexpr, token):
    """(elements, high bits) [tokens, width] of tokens [tokens]: of 3-bit codes the high bits of the same channels, two
    bits apart as the low ones are; else None."""
    EL: tl.constexpr = element_bits(S, KEYS)
    SUBS: tl.constexpr = 32 // EL
    W: tl.constexpr = get(S, "words")
    element = tl.arange(0, width(S, KEYS))[None, :]
    type: tl.constexpr = tl.int32 if EL == 32 else (tl.int16 if EL == 16 else tl.int8)
    base = codes.to(tl.pointer_type(type), bitcast=True) if EL != 32 else codes
    row = token[:, None] * (row_width(S) * SUBS)
    if width(S, KEYS) > W * SUBS:
        low = tl.load(base + row + element, mask=element < W * SUBS, other=0)
    else:
        low = tl.load(base + row + element)
    if EL == 8:
        low = low.to(tl.int16)
    if get(S, "bits") == 3:
        H: tl.constexpr = W // 2
        word, sub = element // SUBS, element % SUBS
        place = row + W * SUBS + (word % H) * SUBS + sub
        high = tl.load(base + place, mask=word < W, other=0)
        if EL == 8:
            high = high.to(tl.int16)
        return low, high >> (word // H).to(high.dtype)
    else:
        return low, low


@triton.jit
def plane(low, high, S: tl.constexpr, field: tl.constexpr):
    """float16 [tokens, width]: the codes of a plane times field_unit / UNIT."""
    SHIFT: tl.constexpr = field_shift(S, field)
    PLACE: tl.constexpr = field_place(S, field)
    if get(S, "bits") == 3:
        code = ((low >> SHIFT) & 3) | (((high >> SHIFT) & 1) << 2)
    else:
        code = (low >> SHIFT) & (((1 << get(S, "bits")) - 1) << PLACE)
    return code.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def fold_queries(q, S: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr, T: tl.constexpr):
    """The queries' planes [M, width]. Where groups are per token: planes of the elements first in their words, then of
    the second ones, ..., the others 0, since their groups differ; and the sums [M] of each group of channels."""
    D: tl.constexpr = get(S, "dim")
    member = tl.arange(0, M)[:, None]
    SUBS: tl.constexpr = 32 // element_bits(S, True)
    SETS: tl.constexpr = SUBS if get(S, "axis") == "token" else 1
    sub = tl.arange(0, width(S, True))[None, :] % SUBS
    planes = ()
    for i in tl.static_range(SETS):
        for f in tl.static_range(fields(S, True)):
            channel = plane_channels(S, True, f)[None, :]
            mine = (member < GROUP) & (channel < D) & ((sub == i) | (SETS == 1))
            x = tl.load(q + member * D + channel, mask=mine, other=0.0)
            planes = planes + ((x.to(tl.float32) * field_unit(S, f)).to(T),)
    sums = ()
    if get(S, "axis") == "token":
        within = tl.arange(0, padded(get(S, "group")))[None, :]
        for g in tl.static_range(D // get(S, "group")):
            mine = (member < GROUP) & (within < get(S, "group"))
            x = tl.load(q + member * D + g * get(S, "group") + within, mask=mine, other=0.0)
            sums = sums + (tl.sum(x.to(tl.float32), axis=1),)
    return planes, sums


@triton.jit
def fold_scores(
    queries, side, S: tl.constexpr, tile, token, M: tl.constexpr, N: tl.constexpr, T: tl.constexpr, PREC: tl.constexpr
):
    """q . k of a tile, float32 [M, N]. queries: of `fold_queries`; token [N]: tokens tile N, tile N + 1, ..."""
    low, high = load_elements(side[0], S, True, token)
    if get(S, "axis") == "channel":
        return _scores_of_channels(queries[0], low, high, side, S, tile, M, N, T, PREC)
    else:
        return _scores_of_tokens(queries, low, high, side, S, token, M, N, T, PREC)


@triton.jit
def scale_and_zero(side, S: tl.constexpr, place, seen):
    """float32 scales and zero-points at `place`."""
    s = tl.load(side[1] + place, mask=seen, other=0.0).to(tl.float32)
    if not get(S, "shifted"):
        return s, s * (-get(S, "level"))
    else:
        return s, tl.load(side[2] + place, mask=seen, other=0.0).to(tl.float32)


@triton.jit
def _scores_of_channels(
    planes, low, high, side, S: tl.constexpr, tile, M: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """q . (s c + z) = (q s) . c + q . z, with one s and z per channel of the tile."""
    D: tl.constexpr = get(S, "dim")
    scores = tl.zeros([M, N], tl.float32)
    offset = tl.zeros([M, width(S, True)], tl.float32)
    base = (tile * N // get(S, "group")) * D
    for f in tl.static_range(fields(S, True)):
        channel = plane_channels(S, True, f)
        s, z = scale_and_zero(side, S, base + channel, channel < D)
        scores = tl.dot(
            planes[f] * s.to(T)[None, :], tl.trans(plane(low, high, S, f).to(T)), scores, input_precision=PREC
        )
        offset += planes[f].to(tl.float32) * (z / field_unit(S, f))[None, :]
    return scores * UNIT + tl.sum(offset, axis=1)[:, None]


@triton.jit
def _scores_of_tokens(
    queries, low, high, side, S: tl.constexpr, token, M: tl.constexpr, N: tl.constexpr, T: tl.constexpr,
    PREC: tl.constexpr,
):  # fmt: skip
    """q . (s c + z) = sum over groups of s (q_g . c_g) + z sum(q_g), with one s and z per token and group."""
    planes, sums = queries
    SUBS: tl.constexpr = 32 // element_bits(S, True)
    GROUPS: tl.constexpr = get(S, "dim") // get(S, "group")
    scores = tl.zeros([N, M], tl.float32)
    for g in tl.static_range(GROUPS):
        part = tl.zeros([N, M], tl.float32)
        for i in tl.static_range(SUBS):
            for f in tl.static_range(fields(S, True)):
                if field_group(S, f, i, True) == g:
                    a = tl.trans(planes[i * fields(S, True) + f])
                    part = tl.dot(plane(low, high, S, f).to(T), a, part, input_precision=PREC)
        s, z = scale_and_zero(side, S, token * GROUPS + g, token >= 0)
        scores += part * (s * UNIT)[:, None] + sums[g][None, :] * z[:, None]
    return tl.trans(scores)


@triton.jit
def fold_values(
    acc, weights, shrink, side, S: tl.constexpr, tile, token, N: tl.constexpr, T: tl.constexpr, PREC: tl.constexpr
):
    """acc shrink + weights V. acc: planes [M, width] of numbers less by field_unit UNIT, and where groups are per token
    sum p z [M] of each group."""
    low, high = load_elements(side[0], S, False, token)
    if get(S, "axis") == "channel":
        return _values_of_channels(acc, weights.to(T), shrink, low, high, side, S, tile, N, T, PREC)
    else:
        return _values_of_tokens(acc, weights, shrink, low, high, side, S, token, T, PREC)


@triton.jit
def _values_of_channels(
    acc, weights, shrink, low, high, side, S: tl.constexpr, tile, N: tl.constexpr, T: tl.constexpr, PREC: tl.constexpr
):
    """sum_t p (s c + z) = s (sum_t p c) + z sum_t p, with one s and z per channel of the tile."""
    D: tl.constexpr = get(S, "dim")
    planes, offsets = acc
    base = (tile * N // get(S, "group")) * D
    mass = tl.sum(weights.to(tl.float32), axis=1)[:, None]
    new = ()
    for f in tl.static_range(fields(S, False)):
        channel = plane_channels(S, False, f)
        s, z = scale_and_zero(side, S, base + channel, channel < D)
        x = tl.dot(weights, plane(low, high, S, f).to(T), input_precision=PREC)
        x = x * s[None, :] + mass * (z / (field_unit(S, f) * UNIT))[None, :]
        new = new + (planes[f] * shrink[:, None] + x,)
    return new, offsets


@triton.jit
def _values_of_tokens(
    acc, weights, shrink, low, high, side, S: tl.constexpr, token, T: tl.constexpr, PREC: tl.constexpr
):
    """sum_t p (s c + z) = sum_t (p s) c + sum_t p z, with one s and z per token and group of channels."""
    GROUPS: tl.constexpr = get(S, "dim") // get(S, "group")
    planes, offsets = acc
    scaled, sums, new = (), (), ()
    for g in tl.static_range(GROUPS):
        s, z = scale_and_zero(side, S, token * GROUPS + g, token >= 0)
        scaled = scaled + ((weights * s[None, :]).to(T),)
        sums = sums + (offsets[g] * shrink + tl.sum(weights * z[None, :], axis=1),)
    for f in tl.static_range(fields(S, False)):
        p = scaled[field_group(S, f, 0, False)]
        new = new + (tl.dot(p, plane(low, high, S, f).to(T), planes[f] * shrink[:, None], input_precision=PREC),)
    return new, sums


@triton.jit
def fold_nothing(S: tl.constexpr, M: tl.constexpr):
    """`acc` of no tokens."""
    planes, offsets = (), ()
    for _ in tl.static_range(fields(S, False)):
        planes = planes + (tl.zeros([M, width(S, False)], tl.float32),)
    if get(S, "axis") == "token":
        for _ in tl.static_range(get(S, "dim") // get(S, "group")):
            offsets = offsets + (tl.zeros([M], tl.float32),)
    return planes, offsets


@triton.jit
def fold_store(acc, out, total, S: tl.constexpr, GROUP: tl.constexpr, M: tl.constexpr):
    """acc / total to `out` [M] pointers."""
    planes, offsets = acc
    member = tl.arange(0, M)[:, None]
    for f in tl.static_range(fields(S, False)):
        channel = plane_channels(S, False, f)[None, :]
        x = planes[f] * (field_unit(S, f) * UNIT)
        if get(S, "axis") == "token":
            x += offsets[field_group(S, f, 0, False)][:, None]
        tl.store(out[:, None] + channel, x / total[:, None], mask=(member < GROUP) & (channel < get(S, "dim")))

"""Keys of a tile from their codes: S' c, gain, mean, RoPE, in registers; queries that turn from tile to tile."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.rope import load_cos_sin, pair_channels, position_cos_sin, unrotate
from kvq_kernels.transform_attention.codes import chunks, key_codes


@triton.jit
def key_constants(
    operands, head, rope, F: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
    E: tl.constexpr,
):  # fmt: skip
    """Of each column tile of E pairs of channels: `key_weights`; means `[1, E]` of first and of second channels; cos
    and sin of positions within a tile, float16 `[N, E]`."""
    PAIRS: tl.constexpr = "half" if STYLE == "none" else STYLE
    line = tl.arange(0, N)[:, None]
    constants = ()
    for j in tl.static_range((D // 2 + E - 1) // E):
        weights = key_weights(operands[0], head, j, F, STYLE, WIDTH, D, E)
        pair = j * E + tl.arange(0, E)
        c1, c2 = pair_channels(pair, PAIRS, WIDTH, D)
        mean, inside = operands[1] + head * D, pair < D // 2
        means = tl.load(mean + c1, inside, 0.0)[None, :], tl.load(mean + c2, inside, 0.0)[None, :]
        cos_sin = () if STYLE == "none" else load_cos_sin(rope[2], line, pair[None, :], WIDTH, D)
        constants = constants + ((weights, means, cos_sin),)
    return constants


@triton.jit
def key_weights(
    synthesis, head, J: tl.constexpr, F: tl.constexpr, STYLE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    E: tl.constexpr, VOLATILE: tl.constexpr = False,
):  # fmt: skip
    """S' of each chunk of fields for column tile J `[components, 2 E]`, first channels of all pairs before second ones.

    VOLATILE: loads are not moved out of a loop.
    """
    KC: tl.constexpr = chunks(F)
    C: tl.constexpr = F.components
    column = tl.arange(0, 2 * E)
    c1, c2 = pair_channels(J * E + column % E, "half" if STYLE == "none" else STYLE, WIDTH, D)
    channel = tl.where(column < E, c1, c2)[None, :]
    inside = (J * E + column % E < D // 2)[None, :]
    weights = ()
    for i in tl.static_range(len(KC)):
        component = (8 * KC[i][0] + tl.arange(0, 8 * KC[i][1]))[:, None]
        at = synthesis + (head * C + component) * D + channel
        weights = weights + (tl.load(at, mask=inside & (component < C), other=0.0, volatile=VOLATILE),)
    return weights


@triton.jit
def rotated_keys(
    words, gain, weights, means, cos_sin, F: tl.constexpr, STYLE: tl.constexpr, N: tl.constexpr, E: tl.constexpr,
    HALF_SUMS: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """Both channels of E pairs, float16 [N, E] each: R(position within the tile) (gain S' c + mean).

    weights, means, cos_sin: of a column tile, see `key_constants`. gain: float16 [N]. HALF_SUMS: S' c is summed in
    float16.
    """
    KC: tl.constexpr = chunks(F)
    T: tl.constexpr = tl.float16 if HALF_SUMS else tl.float32
    k = tl.zeros([N, 2 * E], T)
    for i in tl.static_range(len(KC)):
        k = tl.dot(key_codes(words, F, KC[i][0], KC[i][1], N), weights[i], k, out_dtype=T)
    k1, k2 = tl.split(tl.permute(tl.reshape(k, [N, 2, E]), (0, 2, 1)))
    return (_finished_ptx if ASSEMBLY else _finished)(k1, k2, gain, means, cos_sin, F, STYLE, HALF_SUMS)


@triton.jit
def _finished(k1, k2, gain, means, cos_sin, F: tl.constexpr, STYLE: tl.constexpr, HALF_SUMS: tl.constexpr):
    """Keys from the products S' c `[N, E]`: means of both channels, (cos, sin)."""
    k1, k2 = k1.to(tl.float16), k2.to(tl.float16)
    if F.gain:
        k1, k2 = k1 * gain[:, None], k2 * gain[:, None]
    k1, k2 = k1 + means[0], k2 + means[1]
    if STYLE == "none":
        return k1, k2
    else:
        return k1 * cos_sin[0] - k2 * cos_sin[1], k2 * cos_sin[0] + k1 * cos_sin[1]


@triton.constexpr_function
def _ptx(gain: bool, rotate: bool, half_sums: bool) -> str:
    """PTX of `_finished` for two neighbouring numbers of each operand, as Triton does not pair them. Operands: two
    outputs, sums (a register each, or two of float32), means, gain, cos and sin."""
    ops, at = ["{ .reg .b32 a; .reg .b32 b; .reg .b32 t;"], 4 if half_sums else 6
    if half_sums:
        ops += ["mov.b32 a, $2; mov.b32 b, $3;"]
    else:
        ops += ["cvt.rn.f16x2.f32 a, $3, $2; cvt.rn.f16x2.f32 b, $5, $4;"]
    if gain:
        ops += [f"fma.rn.f16x2 a, a, ${at + 2}, ${at}; fma.rn.f16x2 b, b, ${at + 2}, ${at + 1};"]
    else:
        ops += [f"add.f16x2 a, a, ${at}; add.f16x2 b, b, ${at + 1};"]
    at += 2 + gain
    if rotate:
        ops += [f"mul.f16x2 t, b, ${at + 1}; neg.f16x2 t, t; fma.rn.f16x2 $0, a, ${at}, t;"]
        ops += [f"mul.f16x2 t, a, ${at + 1}; fma.rn.f16x2 $1, b, ${at}, t; }}"]
    else:
        ops += ["mov.b32 $0, a; mov.b32 $1, b; }"]
    return " ".join(ops)


@triton.constexpr_function
def _registers(gain: bool, rotate: bool, half_sums: bool) -> str:
    """Constraints of `_ptx`. Outputs are written before all inputs are read."""
    return ",".join(["=&r"] * 2 + ["r"] * ((2 if half_sums else 4) + 2 + gain + 2 * rotate))


@triton.jit
def _finished_ptx(k1, k2, gain, means, cos_sin, F: tl.constexpr, STYLE: tl.constexpr, HALF_SUMS: tl.constexpr):
    """`_finished` on NVIDIA's GPUs."""
    GAIN: tl.constexpr = F.gain
    operands = (k1, k2, tl.broadcast_to(means[0], k1.shape), tl.broadcast_to(means[1], k1.shape))
    if GAIN:
        operands = operands + (tl.broadcast_to(gain[:, None], k1.shape),)
    if STYLE != "none":
        operands = operands + (cos_sin[0], cos_sin[1])
    PTX: tl.constexpr = _ptx(GAIN, STYLE != "none", HALF_SUMS)
    REGISTERS: tl.constexpr = _registers(GAIN, STYLE != "none", HALF_SUMS)
    r1, r2 = tl.inline_asm_elementwise(PTX, REGISTERS, operands, dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    return r1, r2


@triton.jit
def turning_queries(
    q, unit, rope, position, scale, STYLE: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, E: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """(queries, scale [M], steps): both channels of each column tile of pairs, float32 [E, M], in units of the keys,
    turned back by the rotation of `position` and divided so that they are at most 1024; what scores are then multiplied
    by; (cos, sin) [E, 1] of N positions. SIGNED: `position` may be below 0."""
    PAIRS: tl.constexpr = "half" if STYLE == "none" else STYLE
    member = tl.arange(0, M)[None, :]
    queries, steps = (), ()
    largest = tl.full([M], 1e-30, tl.float32)
    for j in tl.static_range((D // 2 + E - 1) // E):
        pair = j * E + tl.arange(0, E)
        c1, c2 = pair_channels(pair, PAIRS, WIDTH, D)
        mask = (pair < D // 2)[:, None] & (member < GROUP)
        u1 = tl.load(unit + c1, pair < D // 2, 0.0)[:, None]
        u2 = tl.load(unit + c2, pair < D // 2, 0.0)[:, None]
        q1 = tl.load(q + member * D + c1[:, None], mask, 0.0).to(tl.float32) * u1
        q2 = tl.load(q + member * D + c2[:, None], mask, 0.0).to(tl.float32) * u2
        if STYLE != "none":
            if SIGNED:
                cos, sin = position_cos_sin(rope, tl.abs(position) + tl.zeros([1], tl.int32), pair, WIDTH, D)
                sin = tl.where(position < 0, -sin, sin)
            else:
                cos, sin = position_cos_sin(rope, position + tl.zeros([1], tl.int32), pair, WIDTH, D)
            q1, q2 = unrotate(q1, q2, tl.trans(cos), tl.trans(sin))
            cos, sin = load_cos_sin(rope[1], tl.full([1, 1], N // 2, tl.int32), pair[None, :], WIDTH, D)
            steps = steps + (tl.trans(cos * cos - sin * sin), tl.trans(2.0 * cos * sin))
        largest = tl.maximum(largest, tl.max(tl.maximum(tl.abs(q1), tl.abs(q2)), axis=0))
        queries = queries + (q1, q2)
    divided = ()
    for j in tl.static_range(len(queries)):
        divided = divided + (queries[j] * (1024.0 / largest)[None, :],)
    return divided, largest * (scale / 1024.0), steps


@triton.jit
def turned(queries, steps, STYLE: tl.constexpr):
    """The queries for the next tile."""
    if STYLE == "none":
        return queries
    else:
        new = ()
        for j in tl.static_range(len(queries) // 2):
            new = new + unrotate(queries[2 * j], queries[2 * j + 1], steps[2 * j], steps[2 * j + 1])
        return new

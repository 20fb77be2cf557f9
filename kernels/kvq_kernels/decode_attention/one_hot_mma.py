"""Products with matrices of ones and zeros, which add numbers where they belong; made by one thread each, handed on.

Both sides of a product lie in the threads that it wants them from before it is asked for: what else would become of
them is conversions, a number at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.byte_permute import interpreted
from kvq_kernels.decode_attention.layout_hints import load_apart
from kvq_kernels.decode_attention.outliers import PIECE
from kvq_kernels.decode_attention.spec import get


@triton.constexpr_function
def in_pairs(spec, precision):
    """Whether products are of bfloat16, two for each number: its first 8 digits and the next 8."""
    return spec.nvidia and precision != "ieee" and not interpreted()


@triton.jit
def sparse_threads(q, D: tl.constexpr):
    """int32 [PIECE / 8, 2, 8, 4], zeros, in the threads that a product wants its sides from, 8 lines by 4.

    A load keeps the threads that `order.py` gives it, and what is computed with it comes to be computed by them. That
    they are zeros is seen later: they cost nothing in loops.
    """
    # Of all axes, or the order of those that are alike would be any.
    channel = tl.arange(0, PIECE // 8)[:, None, None, None] + tl.arange(0, 2)[None, :, None, None]
    channel += tl.arange(0, 8)[None, None, :, None] + tl.arange(0, 4)[None, None, None, :]
    loaded = load_apart(q, tl.minimum(channel, D - 1)).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.minimum(loaded, 0)


@triton.jit
def _spread(x, threads, N: tl.constexpr):
    """x [PIECE, N] as `sparse_threads` are, line n what is in column n % N: 32 numbers, of which each of 4 threads has
    those that lie 4 apart."""
    x = tl.permute(tl.reshape(x, [PIECE // 8, 2, 4, N]), (0, 1, 3, 2))[:, :, None, :, :]
    x = tl.broadcast_to(x, [PIECE // 8, 2, 8 // N, N, 4])
    return tl.reshape(x, [PIECE // 8, 2, 8, 4]) + threads.to(x.dtype)


@triton.jit
def _stacked(parts, N: tl.constexpr):
    """N tensors [PIECE / 8, 2, 8, 4] as one."""
    if N == 1:
        return tl.reshape(parts[0], [1, PIECE // 8, 2, 8, 4])
    else:
        both = tl.join(_stacked(parts[: N // 2], N // 2), _stacked(parts[N // 2 :], N // 2))
        return tl.reshape(tl.permute(both, (5, 0, 1, 2, 3, 4)), [N, PIECE // 8, 2, 8, 4])


@triton.jit
def _operand(parts, N: tl.constexpr):
    """N tensors [PIECE / 8, 2, 8, 4] as one side of products [8 N, PIECE], whose threads are the last axes."""
    x = tl.reshape(_stacked(parts, N), [N, 2, PIECE // 16, 2, 8, 4])
    return tl.reshape(tl.permute(x, (0, 4, 2, 5, 1, 3)), [8 * N, PIECE])


@triton.jit
def _columns(parts, N: tl.constexpr):
    """N tensors [PIECE] as one [PIECE, N]."""
    if N == 1:
        return tl.reshape(parts[0], [PIECE, 1])
    elif N == 2:
        return tl.join(parts[0], parts[1])
    else:
        return tl.reshape(tl.join(_columns(parts[0::2], N // 2), _columns(parts[1::2], N // 2)), [PIECE, N])


@triton.jit
def _handed_on(x, S: tl.constexpr):
    """x [PIECE] of 16 bits. The compiler sees something happen here: else it lets all threads that use x make it again,
    each for itself."""
    if get(S, "nvidia") and not interpreted():
        return tl.inline_asm_elementwise("mov.b16 $0, $1;", "=h,h", [x], x.dtype, is_pure=False, pack=1)
    else:
        return x


@triton.jit
def small(x):
    """float16: integers below 1024 as subnormal numbers, which takes no conversion."""
    return x.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def places(x, threads, S: tl.constexpr):
    """`small(x)` of x [PIECE] as `threads` are, which are handed it as 16 bits."""
    return small(_spread(tl.reshape(_handed_on(x.to(tl.int16), S), [PIECE, 1]), threads, 1))


@triton.jit
def _ones(apart, step: tl.constexpr, T: tl.constexpr):
    """Where `apart` is `small(step)` 1, else 0. T: of products; what float16 has as 1 is 2^-7 as bfloat16."""
    if tl.bfloat16 == T:
        there = tl.full(apart.shape, step * 2.0**-24, tl.float16)
        equal: tl.constexpr = "set.eq.f16x2.f16x2 $0, $1, $2;"
        return tl.inline_asm_elementwise(equal, "=r,r,r", [apart, there], tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.where(apart == step * 2.0**-24, 1.0, 0.0)


@triton.jit
def halves_of(parts):
    """int32 of each: 128 x, as bfloat16 its first 8 digits and below them the next."""
    split: tl.constexpr = """{
        .reg .b32 high; .reg .f32 low;
        and.b32 high, $1, 0xffff0000; sub.rn.f32 low, $1, high; cvt.rn.bf16x2.f32 $0, high, low;
    }"""
    halves = ()
    for i in tl.static_range(len(parts)):
        x = tl.inline_asm_elementwise(split, "=r,r", [parts[i]], tl.int32, is_pure=False, pack=1)
        halves = halves + (x,)
    return halves


@triton.jit
def in_order(x, M: tl.constexpr):
    """x [PIECE, M] in the order in which products sum, see `_spread` and `_operand`."""
    x = tl.reshape(x, [2, PIECE // 16, 2, 4, M])
    return tl.reshape(tl.permute(x, (1, 3, 0, 2, 4)), [PIECE, M])


@triton.jit
def operands(parts, threads, M: tl.constexpr, PAIRS: tl.constexpr):
    """What is multiplied with `_ones`, [PIECE, M], of at most M tensors [PIECE]; PAIRS: of `halves_of`. Columns beyond
    these are finite, and nobody's."""
    if PAIRS:
        N: tl.constexpr = min(8, triton.next_power_of_2(len(parts)))
        highs, lows = (), ()
        for i in tl.static_range(M // 8):
            own = parts[8 * i % len(parts) :][:8]
            for _ in tl.static_range(len(own), N):
                own = own + (tl.zeros_like(own[0]),)
            x = _spread(_columns(own, N), threads, N)
            highs = highs + ((x >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True),)
            lows = lows + (x.to(tl.int16).to(tl.bfloat16, bitcast=True),)
        return tl.trans(_operand(highs, M // 8)), tl.trans(_operand(lows, M // 8))
    else:
        for _ in tl.static_range(len(parts), M):
            parts = parts + (tl.zeros_like(parts[0]),)
        return (in_order(_columns(parts, M), M),)


@triton.jit
def added(apart, steps: tl.constexpr, halves, acc, PRECISION: tl.constexpr):
    """acc [8 rows for each of `steps`, n] with `halves` where rows are `apart` by that step."""
    parts = ()
    for i in tl.static_range(len(steps)):
        parts = parts + (_ones(apart, steps[i], halves[0].dtype),)
    ones = _operand(parts, len(steps))
    for i in tl.static_range(len(halves)):
        acc = tl.dot(ones, halves[i], acc, input_precision=PRECISION)
    return acc

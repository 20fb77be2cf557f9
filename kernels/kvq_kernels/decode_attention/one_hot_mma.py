"""One-hot matmuls that scatter-add outlier corrections: acc += onehot(row) x correction, without atomics.

`outliers.py` reads the outliers, `outlier_corrections.py` adds them to scores and sums by `one_hot_mma`.

Both operands are built in the threads that the product reads them from; Triton would else convert layouts, one number
at a time. One thread computes each outlier and hands it to the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.formats.format import SideSpec
from kvq_kernels.decode_attention.formats.shared import interpreted
from kvq_kernels.decode_attention.layout_hints import load_scattered
from kvq_kernels.decode_attention.outliers import CHUNK


@triton.constexpr_function
def uses_bf16_pairs(spec: SideSpec, precision: str) -> bool:
    """Whether a number is multiplied as two bfloat16: its first 8 significant bits and the next 8."""
    return spec.nvidia and precision != "ieee" and not interpreted()


@triton.jit
def mma_layout_zeros(q, D: tl.constexpr):
    """Zeros that carry the MMA operand layout, 8 rows by 4 threads: int32 [CHUNK / 8, 2, 8, 4].

    A load keeps the layout that `layout_hints.py` asks for, and results of adding it do, too. Only a later pass sees
    that these are zeros: they cost nothing in loops.
    """
    # Depends on all axes: the order of axes without influence would be arbitrary.
    channel = tl.arange(0, CHUNK // 8)[:, None, None, None] + tl.arange(0, 2)[None, :, None, None]
    channel += tl.arange(0, 8)[None, None, :, None] + tl.arange(0, 4)[None, None, None, :]
    loaded = load_scattered(q, tl.minimum(channel, D - 1)).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.minimum(loaded, 0)


@triton.jit
def _to_mma_layout(x, layout, N: tl.constexpr):
    """x [CHUNK, N] in the layout of `mma_layout_zeros`: row n has column n % N, 32 numbers of which each of 4 threads
    holds every fourth."""
    x = tl.permute(tl.reshape(x, [CHUNK // 8, 2, 4, N]), (0, 1, 3, 2))[:, :, None, :, :]
    x = tl.broadcast_to(x, [CHUNK // 8, 2, 8 // N, N, 4])
    return tl.reshape(x, [CHUNK // 8, 2, 8, 4]) + layout.to(x.dtype)


@triton.jit
def _stack(parts, N: tl.constexpr):
    """N tensors [CHUNK / 8, 2, 8, 4] as one [N, CHUNK / 8, 2, 8, 4]."""
    if N == 1:
        return tl.reshape(parts[0], [1, CHUNK // 8, 2, 8, 4])
    else:
        both = tl.join(_stack(parts[: N // 2], N // 2), _stack(parts[N // 2 :], N // 2))
        return tl.reshape(tl.permute(both, (5, 0, 1, 2, 3, 4)), [N, CHUNK // 8, 2, 8, 4])


@triton.jit
def _mma_operand(parts, N: tl.constexpr):
    """N tensors [CHUNK / 8, 2, 8, 4] as a left operand [8 N, CHUNK]; the last axes are the threads."""
    x = tl.reshape(_stack(parts, N), [N, 2, CHUNK // 16, 2, 8, 4])
    return tl.reshape(tl.permute(x, (0, 4, 2, 5, 1, 3)), [8 * N, CHUNK])


@triton.jit
def _join_columns(parts, N: tl.constexpr):
    """N tensors [CHUNK] as one [CHUNK, N]."""
    if N == 1:
        return tl.reshape(parts[0], [CHUNK, 1])
    elif N == 2:
        return tl.join(parts[0], parts[1])
    else:
        return tl.reshape(tl.join(_join_columns(parts[0::2], N // 2), _join_columns(parts[1::2], N // 2)), [CHUNK, N])


@triton.jit
def _opaque(x, S: tl.constexpr):
    """x [CHUNK] of 16 bits behind an opaque move: else every thread that uses x would compute it again."""
    if S.nvidia and not interpreted():
        return tl.inline_asm_elementwise("mov.b16 $0, $1;", "=h,h", [x], x.dtype, is_pure=False, pack=1)
    else:
        return x


@triton.jit
def subnormal(x):
    """float16 with the bits of integers below 1024: subnormal numbers, without a conversion."""
    return x.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def spread_indices(x, layout, S: tl.constexpr):
    """`subnormal(x)` of x [CHUNK] in `layout` (of `mma_layout_zeros`), exchanged between threads as 16 bits."""
    return subnormal(_to_mma_layout(tl.reshape(_opaque(x.to(tl.int16), S), [CHUNK, 1]), layout, 1))


@triton.jit
def _one_hot(distance, step: tl.constexpr, T: tl.constexpr):
    """1 where `distance` is `subnormal(step)`, else 0, in the products' type T. As bfloat16 that 1 is 2^-7: the bits of
    float16's 1, which `correct_scores` and `correct_values` multiply by 128."""
    if tl.bfloat16 == T:
        wanted = tl.full(distance.shape, step * 2.0**-24, tl.float16)
        equal: tl.constexpr = "set.eq.f16x2.f16x2 $0, $1, $2;"
        return tl.inline_asm_elementwise(equal, "=r,r,r", [distance, wanted], tl.bfloat16, is_pure=True, pack=2)
    else:
        return tl.where(distance == step * 2.0**-24, 1.0, 0.0)


@triton.jit
def split_bf16(parts):
    """int32 of each x: its first 8 significant bits as bfloat16 in the upper half, the next 8 in the lower."""
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
def mma_order(x, M: tl.constexpr):
    """x [CHUNK, M] with rows in the order of the left operand's columns (`_to_mma_layout`, `_mma_operand`)."""
    x = tl.reshape(x, [2, CHUNK // 16, 2, 4, M])
    return tl.reshape(tl.permute(x, (1, 3, 0, 2, 4)), [CHUNK, M])


@triton.jit
def right_operands(parts, layout, M: tl.constexpr, PAIRS: tl.constexpr):
    """Right operands [CHUNK, M] for one-hot products, of at most M tensors [CHUNK]; PAIRS: of `split_bf16`. Further
    columns are finite and unused."""
    if PAIRS:
        N: tl.constexpr = min(8, triton.next_power_of_2(len(parts)))
        highs, lows = (), ()
        for i in tl.static_range(M // 8):
            columns = parts[8 * i % len(parts) :][:8]
            for _ in tl.static_range(len(columns), N):
                columns = columns + (tl.zeros_like(columns[0]),)
            x = _to_mma_layout(_join_columns(columns, N), layout, N)
            highs = highs + ((x >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True),)
            lows = lows + (x.to(tl.int16).to(tl.bfloat16, bitcast=True),)
        return tl.trans(_mma_operand(highs, M // 8)), tl.trans(_mma_operand(lows, M // 8))
    else:
        for _ in tl.static_range(len(parts), M):
            parts = parts + (tl.zeros_like(parts[0]),)
        return (mma_order(_join_columns(parts, M), M),)


@triton.jit
def one_hot_mma(distance, steps: tl.constexpr, halves, acc, PRECISION: tl.constexpr):
    """acc [8 rows per step, n] plus the right operands' rows whose `distance` equals that row's step."""
    parts = ()
    for i in tl.static_range(len(steps)):
        parts = parts + (_one_hot(distance, steps[i], halves[0].dtype),)
    ones = _mma_operand(parts, len(steps))
    for i in tl.static_range(len(halves)):
        acc = tl.dot(ones, halves[i], acc, input_precision=PRECISION)
    return acc

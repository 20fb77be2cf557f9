"""Loads with layout hints: which threads and registers hold which axis of a tensor.

Triton assigns axes by contiguity and breaks ties differently in different versions. The hints break them one way.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def hinted(pointer, offset):
    """Pointers pointer + offset; of four or five axes, with hints that the last one is held in registers of a thread,
    earlier ones by threads, the last of them fastest.

    They break ties in Triton's axis order: no load becomes too wide, since of the last axis Triton uses no more than
    its size and the divisibility of its offsets allow; within that, numbers must be contiguous.
    """
    pointers = pointer + offset  # here, since hints on an argument are lost
    if len(pointers.shape) == 4:
        pointers = tl.max_contiguous(pointers, [1, 2, 4, 16])
    elif len(pointers.shape) == 5:
        pointers = tl.max_contiguous(pointers, [1, 2, 4, 8, 16])
    return pointers


@triton.jit
def load(pointer, offset, mask=None, other=0):
    """Load pointer + offset, see `hinted`; `other` where `mask` (None: everywhere) is false."""
    pointers = hinted(pointer, offset)
    if mask is None:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=other)


@triton.jit
def load_once(pointer, offset):
    """Load pointer + offset, see `hinted`, which nothing reads again: it is the first to leave the caches."""
    return tl.load(hinted(pointer, offset), eviction_policy="evict_first")


@triton.jit
def load_scattered(pointer, offset):
    """Load pointer + offset [a, b, c, d], anywhere in memory: all axes are held by threads, the last one fastest."""
    pointers = tl.max_contiguous(tl.multiple_of(pointer + offset, [1, 1, 1, 1]), [1, 2, 4, 8])
    return tl.load(pointers)


@triton.jit
def _unstack(x):
    """x [a power of two, A, B, C, V] as a tuple of tensors [A, B, C, V]."""
    N: tl.constexpr = x.shape[0]
    if N == 1:
        return (tl.reshape(x, x.shape[1:]),)
    else:
        A: tl.constexpr = x.shape[1]
        B: tl.constexpr = x.shape[2]
        C: tl.constexpr = x.shape[3]
        V: tl.constexpr = x.shape[4]
        first, second = tl.split(tl.permute(tl.reshape(x, [2, N // 2, A, B, C, V]), (1, 2, 3, 4, 5, 0)))
        return _unstack(first) + _unstack(second)


@triton.jit
def load_fields(row, word, FIRST: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr, mask=None):
    """Tuple of tensors: row [A, B, 1, 1] + field W + word [1, 1, 4, V] for COUNT fields from FIRST on.

    One load, since a pass of the compiler visits all loads for every load.
    """
    fields = ()
    if COUNT & (COUNT - 1) != 0:
        HALF: tl.constexpr = 1 << (COUNT.bit_length() - 1)
        fields = load_fields(row, word, FIRST, HALF, W, mask) + load_fields(
            row, word, FIRST + HALF, COUNT - HALF, W, mask
        )
    elif COUNT > 0:
        offset = (FIRST + tl.arange(0, COUNT))[:, None, None, None, None] * W + word[None]
        fields = _unstack(load(row[None], offset, None if mask is None else mask[None]))
    return fields


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

"""Which threads load what."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load(pointer, offset, seen=None, other=0):
    """What is at pointer + offset; `other` where `seen` (None: everywhere) is not.

    Of four axes and more, the last is a thread's, and those before it, the last of them first, are the threads'. Triton
    deals axes out by how contiguous they are; where several are alike, one version begins with the first of them,
    another with the last. Here they are said to be unlike. That widens no load too far: of the last axis no more is
    believed than it has numbers and its offsets are multiples of; within that the numbers must follow each other.
    """
    place = pointer + offset  # here: what is said of an argument is forgotten
    if len(place.shape) == 4:
        place = tl.max_contiguous(place, [1, 2, 4, 16])
    elif len(place.shape) == 5:
        place = tl.max_contiguous(place, [1, 2, 4, 8, 16])
    if seen is None:
        return tl.load(place)
    else:
        return tl.load(place, mask=seen, other=other)


@triton.jit
def load_apart(pointer, offset):
    """What is at pointer + offset [a, b, c, d], anywhere in memory: all axes are the threads', the last ones first."""
    place = tl.max_contiguous(tl.multiple_of(pointer + offset, [1, 1, 1, 1]), [1, 2, 4, 8])
    return tl.load(place)


@triton.jit
def _unstacked(x):
    """The tensors [A, B, C, V] that x [a power of two, A, B, C, V] consists of."""
    N: tl.constexpr = x.shape[0]
    if N == 1:
        return (tl.reshape(x, x.shape[1:]),)
    else:
        A: tl.constexpr = x.shape[1]
        B: tl.constexpr = x.shape[2]
        C: tl.constexpr = x.shape[3]
        V: tl.constexpr = x.shape[4]
        first, second = tl.split(tl.permute(tl.reshape(x, [2, N // 2, A, B, C, V]), (1, 2, 3, 4, 5, 0)))
        return _unstacked(first) + _unstacked(second)


@triton.jit
def load_fields(row, word, FIRST: tl.constexpr, COUNT: tl.constexpr, W: tl.constexpr, seen=None):
    """What is at row [A, B, 1, 1] + field W + word [1, 1, 4, V], for COUNT fields from the FIRST on: a tensor for each.
    One load, as the compiler looks for all there are at every load."""
    found = ()
    if COUNT & (COUNT - 1) != 0:
        HALF: tl.constexpr = 1 << (COUNT.bit_length() - 1)
        found = load_fields(row, word, FIRST, HALF, W, seen) + load_fields(
            row, word, FIRST + HALF, COUNT - HALF, W, seen
        )
    elif COUNT > 0:
        place = (FIRST + tl.arange(0, COUNT))[:, None, None, None, None] * W + word[None]
        found = _unstacked(load(row[None], place, None if seen is None else seen[None]))
    return found

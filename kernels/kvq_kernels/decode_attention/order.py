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

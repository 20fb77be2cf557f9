"""The channels of values, as rows of products, see `fold.py`: row 8 m + r of a plane is of thread r, its m-th."""

from __future__ import annotations

import triton
import triton.language as tl

from kvq_kernels.decode_attention.layout_hints import load
from kvq_kernels.decode_attention.spec import get
from kvq_kernels.decode_attention.uniform import (
    UNIT,
    beside,
    field_unit,
    group_fields,
    half_fields,
    plane_place,
    runs,
    shares,
    thread_words,
)


@triton.constexpr_function
def rows(spec):
    """Channels of a plane."""
    return 8 * max(2, thread_words(spec, False))


@triton.jit
def row_channels(S: tl.constexpr, number: tl.constexpr, thread, more):
    """The channels of rows 8 `more` + `thread` of a plane, as two parts: the second is known when this is compiled."""
    V: tl.constexpr = thread_words(S, False)
    WORDS: tl.constexpr = 8 // shares(S, False)
    PLACE: tl.constexpr = plane_place(S, False, number)
    FIRST: tl.constexpr = (PLACE[2] + half_fields(S) * PLACE[1]) * get(S, "words") + PLACE[0] * WORDS * V
    share = thread // WORDS * (group_fields(S) // shares(S, False) * get(S, "words"))
    return share + thread % WORDS * V, more * (get(S, "words") if V == 1 else 1) + FIRST


@triton.constexpr_function
def all_seen(spec):
    """Whether all rows have a channel."""
    return runs(spec, False) * (8 // shares(spec, False)) * thread_words(spec, False) == spec.words


@triton.jit
def row_seen(S: tl.constexpr, number: tl.constexpr, thread, more):
    """Which rows of a plane have a channel."""
    V: tl.constexpr = thread_words(S, False)
    WORDS: tl.constexpr = 8 // shares(S, False)
    word = thread % WORDS * V + (0 * more if V == 1 else more)
    return word < get(S, "words") - plane_place(S, False, number)[0] * WORDS * V


@triton.jit
def row_units(S: tl.constexpr, number: tl.constexpr, more):
    """What the numbers of rows 8 `more`, ... of a plane are to be multiplied by, float32."""
    PLACE: tl.constexpr = plane_place(S, False, number)
    NEXT: tl.constexpr = PLACE[2] + beside(S, False) - 1
    return tl.where(more == 0, field_unit(S, PLACE[2]), field_unit(S, NEXT)) * UNIT


@triton.jit
def load_rows(pointer, S: tl.constexpr, number: tl.constexpr):
    """[rows / 8 / V, 8, 4, V] at the channels of a plane, by all four threads of a row; 0 where there is none."""
    V: tl.constexpr = thread_words(S, False)
    thread = tl.max_contiguous(tl.arange(0, 8)[None, :, None, None], [1, 1, 1, 1])
    more = tl.arange(0, rows(S) // 8 // V)[:, None, None, None] + tl.arange(0, V)[None, None, None, :]
    channel, own = row_channels(S, number, thread, more)
    place = pointer + (channel + 0 * tl.arange(0, 4)[None, None, :, None])
    return load(place, own, None if all_seen(S) else row_seen(S, number, thread, more))


@triton.jit
def as_factors(x, S: tl.constexpr):
    """`load_rows` as factors of sums [rows / 8, 8, M / 8, 4, 2]: float32 [rows / 8, 8, 1, 4, 1]."""
    return tl.reshape(tl.permute(x, (0, 3, 1, 2)), [rows(S) // 8, 8, 1, 4, 1]).to(tl.float32)

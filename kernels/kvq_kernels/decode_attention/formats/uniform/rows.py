"""Channels of a plane of uniform values: loads per channel in the layout of the products' rows.

Row 8 m + r of a plane belongs to thread r, whose register m it is. See `planes.py`, and `values.py`, which calls
this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from kvq_kernels.decode_attention.formats.codes import SUBNORMAL_SCALE
from kvq_kernels.decode_attention.formats.uniform.planes import (
    field_scale,
    field_shares,
    fields_per_plane,
    group_fields,
    half_fields,
    plane_position,
    word_runs,
    words_per_thread,
)
from kvq_kernels.decode_attention.layout_hints import load

if TYPE_CHECKING:
    from kvq_kernels.decode_attention.formats.uniform import UniformSpec


@triton.constexpr_function
def plane_rows(spec: UniformSpec) -> int:
    """Channels of a plane."""
    return 8 * max(2, words_per_thread(spec, False))


@triton.jit
def row_channels(S: tl.constexpr, plane: tl.constexpr, thread, register):
    """Channels of rows 8 `register` + `thread` of a plane, as (run-time part, compile-time part)."""
    V: tl.constexpr = words_per_thread(S, False)
    WORDS: tl.constexpr = 8 // field_shares(S, False)
    POSITION: tl.constexpr = plane_position(S, False, plane)
    FIRST: tl.constexpr = (POSITION[2] + half_fields(S) * POSITION[1]) * S.words + POSITION[0] * WORDS * V
    share = thread // WORDS * (group_fields(S) // field_shares(S, False) * S.words)
    return share + thread % WORDS * V, register * (S.words if V == 1 else 1) + FIRST


@triton.constexpr_function
def all_rows_valid(spec: UniformSpec) -> bool:
    """Whether every row of every plane has a channel."""
    return word_runs(spec, False) * (8 // field_shares(spec, False)) * words_per_thread(spec, False) == spec.words


@triton.jit
def row_valid(S: tl.constexpr, plane: tl.constexpr, thread, register):
    """Mask of the rows of a plane that have a channel."""
    V: tl.constexpr = words_per_thread(S, False)
    WORDS: tl.constexpr = 8 // field_shares(S, False)
    word = thread % WORDS * V + (0 * register if V == 1 else register)
    return word < S.words - plane_position(S, False, plane)[0] * WORDS * V


@triton.jit
def row_scales(S: tl.constexpr, plane: tl.constexpr, register):
    """float32 factor of rows 8 `register`, ... of a plane: turns sums of subnormal numbers into sums of codes."""
    POSITION: tl.constexpr = plane_position(S, False, plane)
    NEXT: tl.constexpr = POSITION[2] + fields_per_plane(S, False) - 1
    return tl.where(register == 0, field_scale(S, POSITION[2]), field_scale(S, NEXT)) * SUBNORMAL_SCALE


@triton.jit
def load_rows(pointer, S: tl.constexpr, plane: tl.constexpr):
    """[rows / 8 / V, 8, 4, V] at the channels of a plane, loaded by all four threads of a row; 0 without a channel."""
    V: tl.constexpr = words_per_thread(S, False)
    thread = tl.max_contiguous(tl.arange(0, 8)[None, :, None, None], [1, 1, 1, 1])
    register = tl.arange(0, plane_rows(S) // 8 // V)[:, None, None, None] + tl.arange(0, V)[None, None, None, :]
    channel, static = row_channels(S, plane, thread, register)
    base = pointer + (channel + 0 * tl.arange(0, 4)[None, None, :, None])
    return load(base, static, None if all_rows_valid(S) else row_valid(S, plane, thread, register))


@triton.jit
def as_factors(x, S: tl.constexpr):
    """Result of `load_rows` as float32 [rows / 8, 8, 1, 4, 1], to multiply sums [rows / 8, 8, M / 8, 4, 2] by."""
    return tl.reshape(tl.permute(x, (0, 3, 1, 2)), [plane_rows(S) // 8, 8, 1, 4, 1]).to(tl.float32)

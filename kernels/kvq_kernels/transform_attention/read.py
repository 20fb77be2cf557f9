"""Reading components: one step of some tokens' components, looked up."""

from __future__ import annotations

import triton
import triton.language as tl

#: `parts.ENTRIES`.
ENTRIES = tl.constexpr(256)


@triton.jit
def load_step(steps, step):
    """(group, code, how many, size, row, first) of a step, see `parts.Steps`."""
    at = steps + step * 6
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)


@triton.jit
def step_components(lines, centroids, code, many, size, row, R: tl.constexpr, T: tl.constexpr):
    """[N, R] of type T: a step's components of the tokens whose codes begin at `lines` [N]; 0 beyond the last."""
    number = tl.arange(0, R)
    inside = (number < many)[None, :]
    codes = tl.load(lines[:, None] + (code + number)[None, :], mask=inside, other=0).to(tl.int32)
    entry = (row + number * size)[None, :] * ENTRIES + codes
    return tl.load(centroids + entry, mask=inside, other=0.0).to(tl.float32).to(T)

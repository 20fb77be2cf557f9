"""Subtiles: a tile of the main loop as products of 16 tokens each.

The tokens of a code are in the same row of different subtiles: softmax does not depend on their order.
"""

from __future__ import annotations

import triton
import triton.language as tl

#: Tokens of a subtile: the inner dimension of a product p V.
SUBTILE = tl.constexpr(16)


@triton.jit
def subtile_tokens(line, i: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    """Positions in a tile of the tokens in rows `line` of subtile i: every R blocks of tokens are BLOCK subtiles."""
    return line * BLOCK + (i // BLOCK * (R * BLOCK) + i % BLOCK)

"""Decode attention over a packed cache (flash decoding): out = softmax(scaling q K^T) V, 1 to 16 queries per row.

Keys and values are one `Side` each: a store of packed tokens in one of the `formats` (or several, `PerHead`), sinks, a
ring buffer of recent tokens, and `count`, the packed tokens of each row, int32 on the device. A store is one block of
memory (reserved ahead, as a captured graph needs it). `lengths` are the rows' tokens without left padding. Keys that
are cached before RoPE bring a `Rope`. A codec that divides keys by a norm multiplies the query by it before the call.
Make a `Workspace.like(query, splits)` once and pass it at every step:

    keys = Side(Uniform(codes, scale, bits=2, axis="channel", group=32, zero=zero), count, sinks, ring)
    out = decode_attention(query[:, :, 0], keys, values, lengths, scaling, workspace=workspace)[:, :, None]

Packed tokens may be in pages (`Side.pages`), as vLLM keeps them: a store then has pages instead of rows.

No argument is read on the host: both launches can be captured in a CUDA graph, which is replayed after updating
`lengths` and both `count`s in place.

    parts.py            a side: windows, pages, outliers   formats/           storage formats of its packed tokens
    reference.py        the same in PyTorch                pages.py           packed tokens in pages
    launch.py           splits, workspace, constants       arguments.py       a side as a kernel takes it; checks.py
    tiles.py            sizes of tiles                     configs.py         tuned tiles
    kernel.py           split pass, combination            main_loop.py       online softmax over whole tiles
    exact_tokens.py     sinks and recent tokens            mixed_tokens.py    packed on one side only
    addresses.py        pointers of rows, heads, pages     by_element.py      tiles of any format
    several_queries.py  which tokens each query sees       subtiles.py, rope.py, layout_hints.py
    outliers.py         lists of a tile; one_hot_mma.py and outlier_corrections.py add them
"""

from __future__ import annotations

from torch import Tensor

from kvq_kernels.decode_attention.checks import check_arguments
from kvq_kernels.decode_attention.formats.transformed import Transform, Transformed
from kvq_kernels.decode_attention.launch import Workspace, plan_splits, run_kernels
from kvq_kernels.decode_attention.parts import (
    Codebook,
    Dense,
    Directions,
    Outliers,
    Pages,
    PerHead,
    Rope,
    Side,
    Uniform,
)
from kvq_kernels.decode_attention.reference import decode_attention_reference
from kvq_kernels.decode_attention.tiles import Tile
from kvq_kernels.launch_device import Backend, uses_triton

__all__ = [
    "Codebook",
    "Dense",
    "Directions",
    "Outliers",
    "Pages",
    "PerHead",
    "Rope",
    "Side",
    "Tile",
    "Transform",
    "Transformed",
    "Uniform",
    "Workspace",
    "decode_attention",
    "plan_splits",
]


def decode_attention(
    query: Tensor,
    keys: Side,
    values: Side,
    lengths: Tensor,
    scaling: float,
    *,
    rope: Rope | None = None,
    window: int | None = None,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
    backend: Backend = "auto",
    tile: Tile | None = None,
) -> Tensor:
    """softmax(scaling q K^T) V over each row's first lengths[b] tokens: sinks, packed and recent ones.

    query:   `[B, Q, D]` float16, bfloat16 or float32, after RoPE; query heads of a kv head are neighbours. Or
             `[B, Q, k, D]`, of each row's newest k tokens, k = 1 to 16: a query sees its own token and earlier ones.
    keys, values: `Side`s with the same number of sinks.
    lengths: int32 `[B]`, tokens of each row, the new ones included. Queries before a row's first token (a row of fewer
             than k tokens) give zeros.
    scaling: factor on the scores, usually 1 / sqrt(D).
    window:  newest tokens that a query sees, counted from its own; None: all.
    workspace, out (shape of the query): contiguous; allocated if not given.
    backend: "auto" is "triton" on a GPU and under TRITON_INTERPRET=1, else "torch".
    tile:    replaces the tuned one.

    Returns the query's shape and type. ValueError for arguments that do not fit. Products with packed numbers have
    float16 operands and float32 sums: |q s| of a channel and |v| must be below 65504.
    """
    check_arguments(query, keys, values, lengths, rope, workspace, out)
    if not uses_triton(query, backend):
        result = decode_attention_reference(query, keys, values, lengths, scaling, rope, window=window).to(query.dtype)
        return result if out is None else out.copy_(result)
    return run_kernels(query, keys, values, lengths, scaling, rope, window, workspace, out, tile)

"""Check the shapes and layouts that the kernels of `decode_attention` assume. Nothing reads a tensor's numbers, which
would wait for the device."""

from __future__ import annotations

from torch import Tensor

from kvq_kernels.decode_attention.arguments import kv_heads
from kvq_kernels.decode_attention.launch import Workspace
from kvq_kernels.decode_attention.pages import check_pages
from kvq_kernels.decode_attention.parts import Rope, Side
from kvq_kernels.decode_attention.several_queries import MAX_QUERIES, as_query_rows, padded_count, query_count


def check_arguments(
    query: Tensor,
    keys: Side,
    values: Side,
    lengths: Tensor,
    rope: Rope | None,
    workspace: Workspace | None,
    out: Tensor | None,
) -> None:
    """ValueError for arguments that do not fit."""
    if query.ndim not in (3, 4) or not 1 <= query_count(query) <= MAX_QUERIES:
        raise ValueError(
            f"a query {list(query.shape)}: it must be [B, Q, D] or [B, Q, k, D], 1 to {MAX_QUERIES} queries k per row"
        )
    rows, heads = query.shape[:2]
    check_pages("keys", keys, rows)
    check_pages("values", values, rows)
    if heads % kv_heads(keys) or kv_heads(keys) != kv_heads(values):
        raise ValueError(f"{heads} query heads over {kv_heads(keys)} and {kv_heads(values)} kv heads")
    for name, x in (("lengths", lengths), ("keys.count", keys.count), ("values.count", values.count)):
        check_per_row(name, x, query)
    check_offset_and_out(rope, out, query)
    sinks = [0 if side.sinks is None else side.sinks.shape[2] for side in (keys, values)]
    if sinks[0] != sinks[1]:
        raise ValueError(f"keys have {sinks[0]} sinks, values {sinks[1]}")
    for name, side in (("keys", keys), ("values", values)):
        for packed in side.members:
            packed.check(name)
    if workspace is not None:
        check_workspace(workspace, query)


def check_per_row(name: str, x: Tensor, query: Tensor) -> None:
    """ValueError unless `x` has one number per row of the query, contiguous and on its device."""
    if x.shape != query.shape[:1] or x.device != query.device:
        raise ValueError(f"{name} must have one number per row, on {query.device}, not shape {tuple(x.shape)}")
    if not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not of stride {x.stride(0)}: pass {name}.contiguous()")


def check_offset_and_out(rope: Rope | None, out: Tensor | None, query: Tensor) -> None:
    """ValueError unless positions of first tokens are one per row, and the output is laid out as a new one would be."""
    if rope is not None and rope.offset is not None:
        check_per_row("rope.offset", rope.offset, query)
    if out is not None and (out.shape != query.shape or out.device != query.device or not out.is_contiguous()):
        raise ValueError(
            f"out must be contiguous {list(query.shape)} on {query.device}, not {list(out.shape)} of strides "
            f"{out.stride()} on {out.device}: pass torch.empty_like(query), contiguous, or None"
        )


def check_workspace(workspace: Workspace, query: Tensor) -> None:
    """The kernels compute addresses from the query's shape and the number of splits."""
    rows, heads, dim = as_query_rows(query.shape, padded_count(query))
    partial, logsum = workspace.partial, workspace.logsum
    fits = partial.shape[0] >= rows and partial.shape[1] == heads and partial.shape[3] == dim
    fits &= logsum.shape == partial.shape[:3] and partial.shape[2] > 2
    if not fits or partial.device != query.device or not (partial.is_contiguous() and logsum.is_contiguous()):
        raise ValueError(
            f"a workspace {list(partial.shape)} on {partial.device} does not fit a query {list(query.shape)} on "
            f"{query.device}: make it with Workspace.like(query, splits)"
        )

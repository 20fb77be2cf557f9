"""A side as arguments of kernels: specification, pointers and strides; `launch.py` has the other arguments."""

from __future__ import annotations

from torch import Tensor

from kvq_kernels.decode_attention.addresses import (
    OutlierPointers,
    OutlierStrides,
    PagePointers,
    PageStrides,
    SidePointers,
    SideStrides,
    WindowPointers,
    WindowStrides,
)
from kvq_kernels.decode_attention.formats.format import SideSpec, head_strides
from kvq_kernels.decode_attention.pages import cells, page_strides, stored_tensors
from kvq_kernels.decode_attention.parts import PerHead, Side


def kv_heads(side: Side) -> int:
    """Number of kv heads."""
    if isinstance(side.packed, PerHead):
        return sum(map(len, side.packed.heads))
    if side.packed.heads is not None:
        return side.packed.heads
    window = side.sinks if side.ring is None else side.ring
    assert window is not None
    return window.shape[1]


def side_spec(side: Side, dim: int, *, fenced: bool = True, nvidia: bool = True) -> SideSpec:
    """Specification of a side whose heads are all stored alike. dim: head_dim. fenced, nvidia: as in `SideSpec`."""
    assert not isinstance(side.packed, PerHead)
    lists, (cell, runs) = side.outliers, (0, 1) if side.pages is None else cells(side)
    return side.packed.spec(
        dim,
        ring=side.ring is not None,
        normed=side.norm is not None,
        outliers=0 if lists is None else lists.index.shape[-1],
        outlier_block=1 if lists is None else lists.tokens,
        pooled_heads=0 if lists is None or lists.start is None else lists.start.shape[-1] - 1,
        cell=cell,
        cells=runs,
        first=0 if side.pages is None else side.pages.first,
        fenced=fenced,
        nvidia=nvidia,
    )


def pointers(side: Side) -> tuple[SidePointers, SideStrides]:
    """(tensors, strides) of a side, as `addresses.at_head` takes them. Missing tensors are never read."""
    assert not isinstance(side.packed, PerHead)
    packed, lists, pages = side.packed.pointers(), side.outliers, side.pages
    given = (side.sinks, side.ring, side.norm)
    outliers = (None, None, None) if lists is None else (lists.index, lists.value, lists.start)
    tensors = SidePointers(
        packed,
        WindowPointers(*(packed[0] if tensor is None else tensor for tensor in given)),
        OutlierPointers(*(packed[0] if tensor is None else tensor for tensor in outliers)),
        None if pages is None else PagePointers(pages.block_table, pages.slots),
    )
    windows = WindowStrides(
        *_optional_strides(side.sinks),
        *_optional_strides(side.ring),
        *((0, 0) if side.norm is None else side.norm.stride()[:2]),
    )
    if pages is None:
        return tensors, SideStrides(side.packed.strides(), windows, _outlier_strides(side), None)
    heads = {name: tensor.stride(1) for name, tensor, _ in stored_tensors(side)}
    if heads.get("outliers.index") != heads.get("outliers.value"):
        raise ValueError("an outlier's value must be laid out as its index is")
    in_pages = OutlierStrides(None, 0 if "outliers.start" in heads else heads.get("outliers.index", 0), None)
    tables = PageStrides(*page_strides(side), pages.block_table.stride(0))
    return tensors, SideStrides(side.packed.page_strides(heads), windows, in_pages, tables)


def _optional_strides(tensor: Tensor | None) -> tuple[int, int]:
    return (0, 0) if tensor is None else head_strides(tensor)


def _outlier_strides(side: Side) -> OutlierStrides:
    """Strides of outliers whose lists have rows."""
    lists = side.outliers
    if lists is None:
        return OutlierStrides(0, 0, 0)
    if head_strides(lists.index) != head_strides(lists.value):
        raise ValueError("an outlier's value must be laid out as its index is")
    if lists.start is None:
        return OutlierStrides(*head_strides(lists.index), 0)
    return OutlierStrides(lists.index.stride(0), 0, head_strides(lists.start)[0])

"""Pointers and strides of a side as arguments of kernels; `launch.py` has the other arguments."""

from __future__ import annotations

from torch import Tensor

from kvq_kernels.decode_attention.pages import page_strides, stored_tensors
from kvq_kernels.decode_attention.parts import Codebook, Dense, Outliers, Packed, PerHead, Side, Uniform
from kvq_kernels.decode_attention.transformed import Transformed


def kv_heads(side: Side) -> int:
    """Number of kv heads."""
    if isinstance(side.packed, PerHead):
        return sum(map(len, side.packed.heads))
    if isinstance(side.packed, Transformed):  # one transform may be of several heads
        window = side.sinks if side.ring is None else side.ring
        assert window is not None
        return window.shape[1]
    return codes_of(side.packed).shape[1]


def codes_of(packed: Packed) -> Tensor:
    """Codes, or dense numbers."""
    assert not isinstance(packed, Transformed)
    return packed.numbers if isinstance(packed, Dense) else packed.codes


def pointers(side: Side) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """(tensors, strides) of a side, as `dequantize.at_head` takes them; with pages, as `paging.at_paged_head` does."""
    packed = side.packed
    assert not isinstance(packed, PerHead)
    codes = codes_of(packed)
    stored: tuple[Tensor | None, ...]
    if isinstance(packed, Dense):
        stored = (codes, None, None, None, None, None)
    elif isinstance(packed, Codebook):
        stored = (codes, packed.centroids, packed.mean, packed.std, packed.token_scale, packed.token_zero)
    else:
        assert isinstance(packed, Uniform)
        stored = (codes, packed.scale, packed.zero, packed.sign, None, None)
    lists = side.outliers
    outliers = (None, None, None) if lists is None else (lists.index, lists.value, lists.start)
    # Missing tensors are never read; a kernel's function cannot return a pointer that is None.
    tensors = tuple(
        codes if tensor is None else tensor for tensor in (*stored, side.sinks, side.ring, side.norm, *outliers)
    )
    windows: list[int] = []
    for tensor in (side.sinks, side.ring):
        windows += (0, 0) if tensor is None else head_strides(tensor)
    windows += (0, 0) if side.norm is None else side.norm.stride()[:2]
    if side.pages is None:
        return tensors, (*_row_strides(packed), *windows, *_outlier_strides(lists))
    return tensors, _page_strides(side, windows)


def _row_strides(packed: Packed) -> tuple[int, ...]:
    """Strides of (row, head) of codes, scale and token_scale; tokens have no heads."""
    codes, scale, token = codes_of(packed), (0, 0), 0
    if isinstance(packed, Codebook):
        token = 0 if packed.token_scale is None else packed.token_scale.stride(0)
    elif isinstance(packed, Uniform):
        scale = head_strides(packed.scale)
        for tensor in (packed.zero, packed.sign):
            if tensor is not None and tensor.stride() != packed.scale.stride():
                raise ValueError("zero and sign must be laid out as the scale is")
    return *head_strides(codes), *scale, token, 0


def _page_strides(side: Side, windows: list[int]) -> tuple[int, ...]:
    """As `paging.at_paged_head` takes them: the strides of a side without pages, 0 for rows; strides of heads of zero
    and sign; strides of pages and cells in bytes; stride of the block table."""
    assert side.pages is not None
    heads = {name: tensor.stride(1) for name, tensor, _ in stored_tensors(side)}
    if heads.get("outliers.index") != heads.get("outliers.value"):
        raise ValueError("an outlier's value must be laid out as its index is")
    codes = heads["codes"] if "codes" in heads else heads["numbers"]
    lists = 0 if "outliers.start" in heads else heads.get("outliers.index", 0)
    stored = (0, codes, 0, heads.get("scale", 0), 0, 0)
    groups = heads.get("zero", 0), heads.get("sign", 0)
    return *stored, *windows, 0, lists, 0, *groups, *page_strides(side), side.pages.block_table.stride(0)


def page_arguments(keys: Side, values: Side) -> tuple[Tensor | None, ...] | None:
    """(block table, slots) of the keys and the values; None: neither has pages."""
    if keys.pages is None and values.pages is None:
        return None
    given: list[Tensor | None] = []
    for pages in (keys.pages, values.pages):
        given += (None, None) if pages is None else (pages.block_table, pages.slots)
    return tuple(given)


def head_strides(tensor: Tensor) -> tuple[int, int]:
    """Strides of (row, head) of `[B, H, T, n]`. ValueError unless the tokens of a head are contiguous; the stride of an
    axis of length 1 means nothing."""
    expected = ((2, tensor.shape[3]), (3, 1))
    if any(tensor.shape[axis] > 1 and tensor.stride(axis) != stride for axis, stride in expected):
        raise ValueError(f"the tokens of a head must be contiguous, not of strides {tensor.stride()}")
    return tensor.stride(0), tensor.stride(1)


def _outlier_strides(lists: Outliers | None) -> tuple[int, int, int]:
    """Strides of (row, head) of index and value, and of the row of start."""
    if lists is None:
        return 0, 0, 0
    if head_strides(lists.index) != head_strides(lists.value):
        raise ValueError("an outlier's value must be laid out as its index is")
    if lists.start is None:
        return *head_strides(lists.index), 0
    return lists.index.stride(0), 0, head_strides(lists.start)[0]

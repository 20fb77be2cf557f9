"""Pages of a side (`parts.Pages`) on the host: their layout and its checks, views of an allocation, rows gathered.

`addresses.py` has their address arithmetic in kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvq_kernels.decode_attention.parts import Outliers, Packed, Pages, PerHead, Side

#: Bytes at whose multiples pages, cells and the tensors in a cell begin: the widest load of a thread.
ALIGNMENT = 16


def cell_bytes(parts: Sequence[tuple[tuple[int, int], torch.dtype]]) -> int:
    """Bytes of a cell with the tensors `parts` of `cell_views`."""
    return _ceil(_offsets(parts)[-1])


def cell_views(pool: Tensor, parts: Sequence[tuple[tuple[int, int], torch.dtype]]) -> list[Tensor]:
    """Tensors `[pages, H, cells, T, W]` that lie one after the other in each cell of an allocation.

    pool: uint8 `[pages, H, cells, bytes]`, the bytes of a cell contiguous, as an allocation of vLLM is viewed; its
    other strides are multiples of 16, and best of 64: loads of the types of 32 bits are else narrower.
    parts: ((T, W), type) of each tensor; each begins at a multiple of 16 bytes. ValueError where that does not fit.
    """
    strides = pool.stride()
    if pool.dtype != torch.uint8 or pool.dim() != 4 or strides[3] != 1 or any(x % ALIGNMENT for x in strides[:3]):
        raise ValueError(
            f"pages are uint8 [pages, heads, cells, bytes] with strides of whole {ALIGNMENT} bytes, not {pool.dtype} "
            f"of strides {strides}"
        )
    offsets = _offsets(parts)
    if offsets[-1] > pool.shape[3]:
        raise ValueError(f"a cell of {pool.shape[3]} bytes has no room for {offsets[-1]}")
    views = []
    for first, ((units, width), dtype) in zip(offsets, parts, strict=False):
        part = pool[..., first : first + units * width * dtype.itemsize].view(dtype)
        views.append(part.unflatten(3, (units, width)))
    return views


def _offsets(parts: Sequence[tuple[tuple[int, int], torch.dtype]]) -> list[int]:
    """First byte of each tensor in a cell, and the end of the last one."""
    offsets = [0]
    for (units, width), dtype in parts:
        offsets[-1] = _ceil(offsets[-1])
        offsets.append(offsets[-1] + units * width * dtype.itemsize)
    return offsets


def _ceil(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def stored_tensors(side: Side) -> Iterator[tuple[str, Tensor, int]]:
    """(name, tensor `[pages, H, (cells,) T, W]`, tokens of one of the T) of what a side keeps in pages."""
    for packed in side.members:
        for name, tensor, tokens in packed.stored():
            if tensor is not None:
                yield name, tensor, tokens
    lists = side.outliers
    if lists is not None:
        yield "outliers.index", lists.index, lists.tokens
        yield "outliers.value", lists.value, lists.tokens
        if lists.start is not None:
            yield "outliers.start", lists.start, lists.tokens


def cells(side: Side) -> tuple[int, int]:
    """(tokens of a contiguous run, runs of a page) of a side with pages."""
    assert side.pages is not None
    _, tensor, _ = next(stored_tensors(side))
    count = tensor.shape[2] if tensor.dim() == 5 else 1
    return side.pages.block_size // count, count


def page_strides(side: Side) -> tuple[int, int]:
    """Strides of (pages, cells) in bytes, which all stored tensors of a side have in common. ValueError otherwise."""
    strides = set()
    for name, tensor, _ in stored_tensors(side):
        if tensor.stride(-1) != 1 or (tensor.shape[-2] > 1 and tensor.stride(-2) != tensor.shape[-1]):
            raise ValueError(f"the tokens of a head and cell must be contiguous in {name}, not {tensor.stride()}")
        axes = (0, 2) if tensor.dim() == 5 else (0,)
        used = [tensor.element_size() * tensor.stride(i) if tensor.shape[i] > 1 else 0 for i in axes]
        strides.add((used[0], used[1] if len(used) > 1 else 0))
    if len(strides) > 1:
        raise ValueError(f"pages must be in one allocation: strides of pages and cells in bytes are {sorted(strides)}")
    return strides.pop()


def check_pages(name: str, side: Side, rows: int) -> None:
    """ValueError for pages that do not fit `rows` rows, and on the CPU for ids that are out of range."""
    pages = side.pages
    if pages is None:
        return
    table = pages.block_table
    strided = table.dim() == 2 and table.shape[1] > 1 and table.stride(1) != 1
    if table.dtype != torch.int32 or table.dim() != 2 or table.shape[0] != rows or strided:
        raise ValueError(
            f"{name}.pages.block_table must be int32 [{rows}, blocks], not {table.dtype} {tuple(table.shape)}"
        )
    slots = pages.slots
    if slots is not None and (slots.dtype != torch.int32 or slots.shape != (rows,)):
        raise ValueError(f"{name}.pages.slots must be int32 [{rows}], not {slots.dtype} {tuple(slots.shape)}")
    for tensor in (table, slots):
        if tensor is not None and tensor.device != side.count.device:
            raise ValueError(f"{name}.pages must be on {side.count.device}, not {tensor.device}")
    _check_sizes(name, side, pages.block_size, pages.first)
    if table.device.type == "cpu":  # elsewhere a look at the ids would wait for the device
        _check_ids(name, side, pages)


def _check_sizes(name: str, side: Side, block_size: int, first: int) -> None:
    """Check that each tensor has `block_size` tokens in each of as many pages, and whole groups before `first`."""
    sizes = set()
    for part, tensor, tokens in stored_tensors(side):
        held = math.prod(tensor.shape[2:-1]) * tokens
        if tensor.dim() not in (4, 5) or held != block_size or block_size <= 0:
            raise ValueError(f"pages of {part} of {name} have {held} tokens, not block_size={block_size}")
        if first < 0 or first % tokens:
            raise ValueError(f"{name}.pages.first={first} is no whole number of {part}'s {tokens} tokens")
        sizes.add((tensor.shape[0], *tensor.shape[2:-2]))
    if len(sizes) > 1:
        raise ValueError(f"the tensors of {name} have different pages and cells: {sorted(sizes)}")


def _check_ids(name: str, side: Side, pages: Pages) -> None:
    """Check the ids of pages that rows use."""
    table, packed = pages.block_table, side.count.long()
    used = torch.where(packed > 0, -(-(packed + pages.first) // pages.block_size), 0)
    if (used > table.shape[1]).any():
        raise ValueError(
            f"{name}.count has up to {int(packed.max())} tokens from place {pages.first} on, more than the table's "
            f"{table.shape[1]} blocks of {pages.block_size}"
        )
    count = next(stored_tensors(side))[1].shape[0]
    ids = table[torch.arange(table.shape[1]) < used[:, None]]
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise ValueError(f"{name}.pages.block_table has ids {int(ids.min())} to {int(ids.max())}, of {count} pages")


def gathered(side: Side) -> Side:
    """The side without pages: each row's packed tokens copied from its pages into one run of memory.

    Tokens from a row's count on are any.
    """
    pages = side.pages
    if pages is None:
        return side
    count = next(stored_tensors(side))[1].shape[0]
    table = pages.block_table.long().clamp(0, count - 1)

    units = iter([unit for _, _, unit in stored_tensors(side)])

    def rows(tensor: Tensor) -> Tensor:
        """`[B, H, blocks T, W]` of `[pages, H, (cells,) T, W]`, from token `first` on."""
        whole = tensor.flatten(2, 3) if tensor.dim() == 5 else tensor
        return whole[table].transpose(1, 2).flatten(2, 3)[:, :, pages.first // next(units) :]

    def of_rows(tensor: Tensor | None) -> Tensor | None:
        return tensor if tensor is None or pages.slots is None else tensor[pages.slots.long()]

    windows = of_rows(side.sinks), of_rows(side.ring), of_rows(side.norm)
    return replace(changed(side, rows), sinks=windows[0], ring=windows[1], norm=windows[2], pages=None)


def changed(side: Side, change: Callable[[Tensor], Tensor]) -> Side:
    """The side with `change` of each stored tensor `[pages or B, H, ..., W]`, in the order of `stored_tensors`; scales
    per token have W = 1."""
    packed: Packed | PerHead
    if isinstance(side.packed, PerHead):
        packed = PerHead(tuple(member.changed(change) for member in side.packed.members), side.packed.heads)
    else:
        packed = side.packed.changed(change)
    lists = side.outliers
    if lists is not None:
        index, value = change(lists.index), change(lists.value)
        lists = Outliers(index, value, lists.tokens, None if lists.start is None else change(lists.start))
    return replace(side, packed=packed, outliers=lists)

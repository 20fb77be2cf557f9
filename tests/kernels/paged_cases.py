"""Random packed caches in pages: a `Case` whose packed tokens are copied to the cells of a uint8 allocation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from copy import copy
from dataclasses import replace

import torch
from kernel_cases import Case
from kvq_kernels.decode_attention import Pages, Side
from kvq_kernels.decode_attention.pages import cell_bytes, cell_views, changed, stored_tensors


def paged(case: Case, block_size: int, cells: int = 1, shared: int = 0, first: int = 0) -> tuple[Case, Case]:
    """(case, the same in pages): shuffled pages of `cells` cells, in which keys and values lie side by side.

    shared: the first so many pages of all rows are row 0's, in both cases. first: place of packed token 0. Free pages
    and gaps have bits of NaN.
    """
    g = torch.Generator().manual_seed(0)
    sides = [share_prefix(side, max(0, shared * block_size - first)) for side in case.sides]
    rows, room = len(case.lengths), first + max(int(side.count.max()) for side in sides)
    blocks = -(-room // block_size) + 1
    ids = torch.randperm(rows * blocks + 3, generator=g)[: rows * blocks].view(rows, blocks)
    table = torch.full((rows, -(-blocks // 16) * 16), -1, dtype=torch.int32)  # as wide as ahead of time: by 16
    table[:, :blocks] = ids
    table[:, :shared] = table[0, :shared]
    slots = torch.randperm(rows + 2, generator=g)[:rows].int()
    stored = [tensor for side in sides for _, tensor in in_cells(side, block_size, cells, blocks, first)]
    pool = iter(in_pages(stored, table[:, :blocks].long()))
    plain, new = copy(case), copy(case)
    plain.sides, new.sides = (
        sides,
        [side_in_pages(side, pool, Pages(table, block_size, slots, first)) for side in sides],
    )
    return plain, new


def share_prefix(side: Side, tokens: int) -> Side:
    """The side with row 0's first `tokens` packed tokens in all rows."""
    names = iter([tokens // unit for _, _, unit in stored_tensors(side)])

    def shared(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        units = next(names)
        tensor[:, :, :units] = tensor[:1, :, :units]
        return tensor

    return changed(side, shared)


def in_cells(side: Side, block_size: int, cells: int, blocks: int, first: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, `[B, H, blocks, cells, T, W]`) of each stored tensor, in as many blocks as the table has."""
    for name, tensor, unit in stored_tensors(side):
        units, skipped = blocks * block_size // unit, first // unit
        whole = torch.zeros(*tensor.shape[:2], units, tensor.shape[3], dtype=tensor.dtype)
        whole[:, :, :skipped].view(torch.uint8).fill_(255)
        kept = min(units - skipped, tensor.shape[2])
        whole[:, :, skipped : skipped + kept] = tensor[:, :, :kept]
        yield name, whole.unflatten(2, (blocks, cells, -1))


def in_pages(stored: list[torch.Tensor], table: torch.Tensor) -> list[torch.Tensor]:
    """Each `[B, H, blocks, cells, T, W]` as a view `[pages, H, cells, T, W]` of one uint8 allocation."""
    views, regions = {}, {}
    for heads in sorted({x.shape[1] for x in stored}):
        alike = [x for x in stored if x.shape[1] == heads]
        parts = [(tuple(x.shape[4:]), x.dtype) for x in alike]
        regions[heads] = alike, parts, (heads, -(-cell_bytes(parts) // 64) * 64)
    sizes = [math.prod(shape) for _, _, shape in regions.values()]
    allocation = torch.full((int(table.max()) + 1, stored[0].shape[3], sum(sizes) + 64), 255, dtype=torch.uint8)
    for region, (alike, parts, shape) in zip(allocation[..., :-64].split(sizes, 2), regions.values(), strict=True):
        pool = region.unflatten(2, shape).transpose(1, 2)
        views |= {id(x): view for x, view in zip(alike, cell_views(pool, parts), strict=True)}
    for x in stored:
        views[id(x)][table] = x.transpose(1, 2)
    return [views[id(x)] for x in stored]


def side_in_pages(side: Side, pool: Iterator[torch.Tensor], pages: Pages) -> Side:
    """The side with its stored tensors replaced by those of `pool`, and its windows in slots."""
    side = changed(side, lambda _: next(pool))
    slots = pages.slots.long()

    def in_slots(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None:
            return None
        held = torch.full((int(slots.max()) + 1, *tensor.shape[1:]), torch.nan, dtype=tensor.dtype)
        held[slots] = tensor
        return held

    return replace(side, sinks=in_slots(side.sinks), ring=in_slots(side.ring), norm=in_slots(side.norm), pages=pages)

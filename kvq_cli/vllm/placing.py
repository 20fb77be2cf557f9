"""Which page holds which part of the packed tokens, where layers need different numbers of bytes.

All layers of a model share a sequence's list of blocks, so that the pages of one block, one in each layer's tensor,
hold the same tokens: a part that finds no room in its own layer's page can lie in another layer's.
"""

from __future__ import annotations

from collections.abc import Sequence


def least_page(ranks: Sequence[Sequence[Sequence[int]]], step: int) -> tuple[int, list[list[list[int]]]]:
    """The least page, in bytes, in as many of which as a rank has layers the parts of all its layers fit, on each rank;
    and the number of the page that each part is in.

    ranks: bytes of the parts of each layer of each rank. step: of which parts and pages are whole multiples.
    """
    page = step
    for layers in ranks:
        mean = sum(map(sum, layers)) / len(layers)
        page = max(page, -int(-mean // step) * step, *(size for parts in layers for size in parts))
    while True:  # ends at the bytes of the largest layer: every part fits into its own layer's page then
        placed = [_placed(layers, page) for layers in ranks]
        found = [numbers for numbers in placed if numbers is not None]
        if len(found) == len(ranks):
            return page, found
        page += step


def _placed(layers: Sequence[Sequence[int]], page: int) -> list[list[int]] | None:
    """The page of each part: the largest parts first, a part goes to its own layer's page, or where that is full to the
    first one with room. None: a part has no room."""
    room = [page] * len(layers)
    numbers = [[0] * len(parts) for parts in layers]
    order = [(-size, own, part) for own, parts in enumerate(layers) for part, size in enumerate(parts)]
    for negative, own, part in sorted(order):
        size = -negative
        at = own if room[own] >= size else next((i for i, free in enumerate(room) if free >= size), None)
        if at is None:
            return None
        room[at] -= size
        numbers[own][part] = at
    return numbers

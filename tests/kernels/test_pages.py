"""Decode attention over pages: bit for bit what it is over rows that are one run of memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from kernel_cases import (
    CHANNEL,
    DEVICE,
    HALF,
    TEMPORAL,
    Case,
    codebook,
    dense,
    directions,
    per_head,
    random_outliers,
    scalars,
    uniform,
)
from kvq_kernels.decode_attention import Pages, Side, decode_attention
from kvq_kernels.decode_attention.pages import cell_bytes, cell_views
from paged_cases import paged
from tiers import slow

pytestmark = pytest.mark.gpu

KIVI = (partial(uniform, axis="channel"), partial(uniform, axis="token"))
HYBRID = tuple(partial(uniform, axis=axis, mode="hybrid-extra") for axis in ("token", "channel"))
POOLED = partial(random_outliers, capacity=70, pooled=True)
PER_HEAD = (
    partial(per_head, makers=TEMPORAL[:1] + CHANNEL[:1], heads=((0, 2), (1,))),
    partial(per_head, makers=CHANNEL[:1] + TEMPORAL[1:], heads=((1,), (0, 2))),
)
WINDOWS = {"unpacked": (12, 20), "sinks": 4}
#: family -> (keys, values, options of the case).
FAMILIES = {
    "dense": (dense, dense, {"group": 1}),
    "kivi": (*KIVI, {"heads": 2, **WINDOWS}),
    "innerq": (*HYBRID, {"group": 3, "norm": True, **WINDOWS}),
    "temporal": (*TEMPORAL, {"outliers": (random_outliers, random_outliers), **HALF, **WINDOWS}),
    "channel": (*CHANNEL, HALF),
    "kvquant": (*scalars(2), {"heads": 2, "outliers": (random_outliers, POOLED), **HALF, **WINDOWS}),
    "per-head": (*PER_HEAD, {"heads": 3, "outliers": (random_outliers, random_outliers), **HALF, **WINDOWS}),
    "rotated": (*KIVI, {"rope": ("interleaved", 32), "window": 90}),
    "mixed": (scalars(3)[0], codebook, HALF),
    "turboquant": (directions, KIVI[1], WINDOWS),
}
#: Families whose emulated kernels take long.
LONG = ("kvquant", "per-head")


def check(
    family: str,
    lengths: list[int],
    block_size: int,
    cells: int = 1,
    shared: int = 0,
    first: int = 0,
    near: bool = False,
) -> None:
    keys, values, options = FAMILIES[family]
    plain, case = paged(Case(keys, values, lengths, **options), block_size, cells, shared, first)
    if near:
        case.check()
    else:
        assert torch.equal(case.run(), plain.run())
    assert torch.equal(case.reference(torch.float64), plain.reference(torch.float64))


@pytest.mark.parametrize("family", [*(name for name in FAMILIES if name not in LONG), *slow(*LONG)])
def test_pages_equal_rows(family):
    check(family, [0, 129], 128)


@pytest.mark.parametrize("family", ["dense", *slow("kivi", "temporal")])
def test_pages_equal_rows_at_every_edge(family):
    """Rows that end in the middle of a page, at its end and one token later."""
    check(family, [1, 127, 128, 257], 128)


@pytest.mark.parametrize("family", ["kivi", "temporal", *slow("kvquant")])
def test_pages_of_several_cells(family):
    check(family, [300, 40], 256, cells=2)


@pytest.mark.parametrize("family", ["dense", *slow("kivi", "channel")])
def test_rows_share_pages(family):
    check(family, [200, 150, 290], 128, shared=1)


@pytest.mark.parametrize("family", [*(name for name in FAMILIES if name not in ("rotated", *LONG)), *slow(*LONG)])
def test_first_token_at_a_later_place(family):
    """Whole tiles before it: bit for bit as without them."""
    check(family, [0, 1, 290], 128, first=128)


@pytest.mark.parametrize("family", [*(name for name in FAMILIES if name not in LONG), *slow(*LONG)])
def test_first_token_within_a_tile(family):
    """The tail has the tokens of its tile; without a page of the row's, too."""
    check(family, [5, 60, 300], 128, first=96 if family == "kivi" else 32, near=True)


def test_first_token_of_shared_pages():
    check("channel", [200, 150, 290], 128, shared=2, first=40, near=True)


def test_first_place_of_keys_and_values_is_the_same():
    _, case = paged(Case(dense, dense, [40]), 64, first=16)
    case.sides = [case.sides[0], replace(case.sides[1], pages=replace(case.sides[1].pages, first=0))]
    with pytest.raises(ValueError, match="at place 16 of the keys, but 0 of the values"):
        case.run()


def test_small_pages():
    check("kivi", [70, 5, 33], 32)


def test_views_lie_one_after_the_other_in_a_cell():
    parts = [((4, 3), torch.int32), ((2, 5), torch.float16)]
    assert cell_bytes(parts) == 48 + 32
    pool = torch.zeros(3, 2, 2, 96, dtype=torch.uint8)
    words, numbers = cell_views(pool, parts)
    assert words.shape == (3, 2, 2, 4, 3) and numbers.shape == (3, 2, 2, 2, 5)
    words[1, 0, 1], numbers[1, 0, 1] = -1, 1.0
    assert (pool[1, 0, 1, :48] == 255).all() and pool[1, 0, 1, 48:68].any()
    assert int(pool.count_nonzero()) == 48 + 10


@pytest.mark.parametrize(
    "pool", [torch.zeros(2, 1, 1, 24, dtype=torch.uint8), torch.zeros(2, 1, 1, 32), torch.zeros(2, 1, 32).byte()]
)
def test_allocations_that_do_not_fit_are_refused(pool):
    with pytest.raises(ValueError, match="pages are uint8"):
        cell_views(pool, [((1, 4), torch.float16)])


def test_cells_without_room_are_refused():
    with pytest.raises(ValueError, match="no room for 128"):
        cell_views(torch.zeros(2, 1, 1, 64, dtype=torch.uint8), [((16, 4), torch.float16)])


def on_table(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Pages], Pages]:
    return lambda pages: replace(pages, block_table=change(pages.block_table))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (on_table(torch.Tensor.long), "block_table must be int32"),
        (on_table(lambda table: table[:1]), "block_table must be int32"),
        (lambda pages: replace(pages, slots=pages.slots.long()), "slots must be int32"),
        (lambda pages: replace(pages, block_size=64), "not block_size=64"),
        (lambda pages: replace(pages, first=8), "first=8 is no whole number of scale's 32 tokens"),
    ],
)
def test_pages_that_do_not_fit_are_refused(change, message):
    check_refused(change, message)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on a GPU, nobody looks at the ids: that would wait for it")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (on_table(lambda table: table[:, :1]), "more than the table's 1 blocks"),
        (on_table(lambda table: table + 1000), "block_table has ids"),
    ],
)
def test_ids_that_do_not_fit_are_refused_on_a_cpu(change, message):
    check_refused(change, message)


def check_refused(change, message):
    _, case = paged(Case(*KIVI, [129, 40]), 128)
    keys, values = case.sides
    assert keys.pages is not None
    with pytest.raises(ValueError, match=message):
        decode_attention(case.query, replace(keys, pages=change(keys.pages)), values, case.lengths, case.scaling)


def test_cells_without_whole_tiles_are_refused():
    _, case = paged(Case(dense, dense, [40]), 8)
    with pytest.raises(ValueError, match="use a block size that is a multiple of 16"):
        case.run()


def test_tensors_of_several_allocations_are_refused():
    _, case = paged(Case(*KIVI, [129]), 128)
    keys: Side = case.sides[0]
    case.sides = [replace(keys, packed=replace(keys.packed, codes=keys.packed.codes.clone())), case.sides[1]]
    with pytest.raises(ValueError, match="one allocation"):
        case.run()

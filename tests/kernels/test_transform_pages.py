"""Attention over transform codes in pages: against float64, and against the same codes in rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from checks.transform_attention import Case
from kvq_kernels.transform_attention import transform_attention
from tiers import slow, slow_cases

pytestmark = pytest.mark.gpu

#: Widths of two members.
KEYS = ((4, 3, 2, 2), (2, 2))
VALUES = ((3, 2, 2, 1), (2, 1, 1))


@pytest.mark.parametrize(
    ("block_size", "first", "options"),
    [
        (64, 16, {"lengths": [300, 40]}),
        *slow_cases(
            (16, 16, {"lengths": [90, 19]}),
            (48, 0, {"lengths": [150, 34], "window": 40}),
            (128, 32, {"lengths": [300, 15], "offset": 5, "sinks": 8}),
            (64, 48, {"lengths": [300, 70], "rope": "interleaved", "sinks": 8, "gain": (False, True)}),
            (64, 16, {"lengths": [150, 34], "dtype": torch.float32}),
            (64, 16, {"lengths": [150, 34], "joined": True}),
            (64, 16, {"lengths": [170, 90], "rope": None, "window": 60, "members": ((1,), (2, 0)), "heads": 3}),
        ),
    ],
)
def test_pages(block_size, first, options):
    """Of whole tiles, and of less; the first tile begins before token 0, before its position, before the window."""
    widths = (KEYS, VALUES) if "members" in options else (KEYS[0], VALUES[0])
    plain, paged = Case(options.pop("lengths"), *widths, **options).in_pages(block_size, first)
    torch.testing.assert_close(paged.reference(torch.float64), plain.reference(torch.float64))
    paged.check()


@pytest.mark.parametrize("block_size", [64, *slow(128)])
def test_pages_of_whole_tiles_are_the_same_as_rows(block_size, monkeypatch):
    """Bit for bit, in as many splits."""
    monkeypatch.setattr("kvq_kernels.transform_attention.launch.programs", lambda *_: (3, 1))
    heads = {"heads": 3, "members": ((2, 0), (1,))}
    plain, paged = Case([300, 130, 9], KEYS, VALUES, **heads).in_pages(block_size)
    assert torch.equal(paged.run(), plain.run())


def test_keys_and_values_have_their_own_slots():
    case = Case([90, 34], KEYS[0], VALUES[0]).in_pages(64)[1]
    expected, values = case.run(), case.values
    slots = len(values.ring) - 1 - values.pages.slots
    case.sides[1] = replace(
        values, sinks=values.sinks.flip(0), ring=values.ring.flip(0), pages=replace(values.pages, slots=slots)
    )
    assert torch.equal(case.run(), expected)


def test_pages_that_do_not_fit_are_refused():
    plain, paged = Case([90]).in_pages(64)
    keys, values = paged.sides

    def refused(match, keys=keys, values=values):
        with pytest.raises(ValueError, match=match):
            transform_attention(paged.query, keys, values, paged.lengths, 1.0, rope=paged.rope)

    def moved(**changes):
        return replace(keys, pages=replace(keys.pages, **changes))

    refused("both or none", values=plain.values)
    refused(
        "both or none", *(replace(side, pages=replace(side.pages, first=16 * (side is keys))) for side in paged.sides)
    )
    refused("not block_size=32", replace(keys, pages=replace(keys.pages, block_size=32)))
    refused(
        "block_table must be int32", replace(keys, pages=replace(keys.pages, block_table=keys.pages.block_table[0]))
    )
    wide = torch.stack(2 * [keys.packed.gain], dim=3)[..., 0]
    refused("contiguous", replace(keys, packed=replace(keys.packed, gain=wide)))

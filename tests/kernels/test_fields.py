"""Places of fields: disjoint, readable as subnormal numbers, within the rate."""

import itertools
import random

import pytest
from kvq_kernels.fields import FRACTION, MAX_WIDTH, fits, parts, places, rate


def test_fields_are_disjoint_and_within_their_rooms() -> None:
    """Of random profiles; a machine with a GPU may lack hypothesis."""
    noise = random.Random(0)
    drawn = [sorted(noise.choices(range(1, MAX_WIDTH + 1), k=count % 33), reverse=True) for count in range(330)]
    fitting = [tuple(widths) for widths in drawn if fits(widths)]
    assert len(fitting) > 100
    for widths in fitting:
        check_places(widths)


def check_places(widths: tuple[int, ...]) -> None:
    used: set[tuple[int, int, int]] = set()
    for (part, word, shift, offset), width in zip(places(widths), widths, strict=True):
        own = {(part, word, shift + offset + bit) for bit in range(width)}
        assert not own & used and offset + width <= FRACTION
        assert shift + offset + width <= parts(rate(widths))[part].room
        used |= own
    assert len(used) == sum(widths) <= 4 * rate(widths)


@pytest.mark.parametrize("lane_bytes", range(1, 70))
def test_parts_have_all_bytes(lane_bytes: int) -> None:
    assert sum(part.words * part.bits for part in parts(lane_bytes)) == 8 * lane_bytes
    sizes = [part.size for part in parts(lane_bytes)]
    assert sizes == sorted(set(sizes), reverse=True)


def test_known_places() -> None:
    assert rate((4, 4, 3, 3, 3, 2, 2, 2, 2, 2, 2, 1)) == 8
    # Word 0: 4 4 | 3 3 (bits 8 to 13), then 2; word 1: 3 2 2 2 | 2 2 1.
    assert places((4, 4, 3, 3, 3, 2, 2, 2, 2, 2, 2, 1)) == (
        *((0, 0, 0, 0), (0, 0, 0, 4), (0, 0, 8, 0), (0, 0, 8, 3)),
        *(
            (0, 1, 0, 0),
            (0, 0, 8, 6),
            (0, 1, 0, 3),
            (0, 1, 0, 5),
            (0, 1, 0, 7),
            (0, 1, 9, 0),
            (0, 1, 9, 2),
            (0, 1, 9, 4),
        ),
    )


@pytest.mark.parametrize("count", range(1, 17))
def test_equal_widths_that_divide_words_fit(count: int) -> None:
    assert all(fits((width,) * count) for width in (1, 2, 4))


def test_profiles_that_do_not_fit() -> None:
    assert not fits((5, 5, 5, 5))  # rooms of 16 and 4 bits
    assert not fits((2, 3)) and not fits((9,)) and not fits((0,))
    with pytest.raises(ValueError, match="do not fit lanes of 5 bytes"):
        places((5, 5, 5, 5))


def test_parts_of_a_rate() -> None:
    assert [(part.name, part.words, part.bits) for part in parts(47)] == [
        *(("codes16", 8, 32), ("codes8", 2, 32), ("codes4", 1, 32), ("codes2", 1, 16), ("codes1", 1, 8)),
    ]
    with pytest.raises(ValueError, match="at least one byte"):
        parts(0)


def test_few_profiles_of_full_lanes_are_refused() -> None:
    """Of profiles of 4 fields that fill their lanes, as calibration makes them."""
    full = [w for w in itertools.combinations_with_replacement(range(8, 0, -1), 4) if sum(w) % 4 == 0]
    assert sum(map(fits, full)) > 0.5 * len(full)

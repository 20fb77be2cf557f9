"""Attention over transform codes by the kernels against float64."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from checks.transform_attention import Case
from kvq_kernels.decode_attention import PerHead, Uniform, decode_attention
from kvq_kernels.transform_attention import transform_attention
from kvq_kernels.transform_attention.launch import fused
from kvq_kernels.tuning import trying
from tiers import slow, slow_cases

pytestmark = pytest.mark.gpu

#: Profiles whose lanes have 16 + 4, 8 + 2, 4 + 2 + 1, 2 and 1 bytes, and three pieces of 16.
WIDTHS = {
    20: (8, 8, 8, 8, 8, 8, 8, 8, 8, 4, 4),
    10: (8, 8, 5, 5, 3, 3, 2, 2, 2, 2),
    7: (8, 5, 5, 4, 3, 3),
    2: (4, 3),
    1: (3,),
    48: (8,) * 24,
}


@pytest.mark.parametrize("lengths", [[69], *slow([1], [7], [15, 16, 17], [20, 21, 22], [1000, 5, 129], [0, 300])])
def test_lengths(lengths):
    """Rows with nothing packed, part of a tile, several tiles and splits."""
    Case(lengths).check()


@pytest.mark.parametrize("lane_bytes", [7, *slow(1, 2, 10, 20)])
def test_pieces(lane_bytes):
    Case([90], WIDTHS[lane_bytes], WIDTHS[lane_bytes], dim=128, heads=1).check()


def test_several_tiles_of_channels():
    with trying("transform_attention", {"pairs": 16}):
        Case([90], dim=64, heads=1).check()


def test_pytorch_writes_the_output_that_is_given():
    case = Case([40, 7])
    given, rope = (case.query, *case.sides, case.lengths, case.scaling), {"rope": case.rope, "backend": "torch"}
    new = transform_attention(*given, **rope)
    out = torch.full_like(new, torch.nan)
    assert transform_attention(*given, **rope, out=out) is out and torch.equal(out, new)


@pytest.mark.slow
def test_wide_codes_of_large_heads():
    Case([90], WIDTHS[48], WIDTHS[20], dim=256, heads=1).check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, *slow(torch.float32)])
def test_types(dtype):
    Case([70, 40], dtype=dtype).check()


@pytest.mark.parametrize("gain", [(True, False), *slow((False, True), (False, False))])
def test_gains_of_keys_or_values(gain):
    Case([90], gain=gain).check()


@pytest.mark.parametrize("dim", [96, *slow(16, 64, 80, 128, 256)])
def test_head_dims(dim):
    Case([90], dim=dim, heads=1).check()


@pytest.mark.parametrize(("heads", "group"), [(2, 7), *slow_cases((3, 1), (2, 4), (1, 8), (1, 16))])
def test_query_heads(heads, group):
    Case([80, 34], heads=heads, group=group).check()


@pytest.mark.parametrize(
    ("style", "rotated", "scale"),
    [("interleaved", 32, 1.0), *slow_cases(("half", 16, 1.3), ("interleaved", 16, 1.3), (None, None, 1.0))],
)
def test_rotations(style, rotated, scale):
    """Of some channels or all, with YaRN's factor, at positions behind left padding."""
    Case([150, 90], rope=style, rotated=rotated, scale=scale, offset=3 if style else 0).check()


@pytest.mark.parametrize("window", [40, *slow(1, 20, 100, 149)])
def test_sliding_windows(window):
    Case([150, 7], window=window).check()


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), *slow_cases((30, 1), (1, 70))])
def test_windows_of_exact_tokens(sinks, recent):
    Case([170, 33], sinks=sinks, recent=recent).check()


def test_sums_in_float16():
    with trying("transform_attention", {"half_sums": 1}):
        Case([150]).check(floor=1e-3)


@pytest.mark.parametrize("values", [{"chunks": 2, "reload": 1}, *slow({"chunks": 1})])
def test_components_are_filled_up_to_few_chunks(values):
    """14 fields in 16; S' is loaded for each tile."""
    with trying("transform_attention", values):
        Case([150], (2,) * 12).check()


@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.float32)])
def test_a_transform_of_all_heads(dtype):
    case = Case([90, 40], joined=True, dtype=dtype)
    assert not fused(case.query, case.keys, case.values)
    case.check()


@pytest.mark.parametrize("keys", [(), (4, 2)])
def test_nothing_kept(keys):
    """Numbers are the mean."""
    Case([60], keys, (), sinks=2).check()


def test_constant_head_is_finite():
    """A head whose transform is zero keeps its mean."""
    case = Case([60])
    for side in (case.keys, case.values):
        transform = side.packed.transform
        for x in (transform.synthesis, transform.operands.synthesis):
            x[0] = 0
    case.check()


def test_nothing_packed_yet():
    Case([9, 4], recent=8, packed=False).check()


def test_large_keys_and_queries():
    """Queries and means beyond float16's precise range in units of the keys."""
    case = Case([90], mean=100.0, dtype=torch.bfloat16)
    case.query *= 50
    case.check()


def test_workspace_is_optional():
    case = Case([50])
    args = (case.query, case.keys, case.values, case.lengths, case.scaling)
    out = transform_attention(*args, rope=case.rope, backend="triton")
    torch.testing.assert_close(out, case.run(), atol=0, rtol=0)


KEY_MEMBERS = ((4, 3, 2, 2), (2, 2), (5, 4, 3, 2, 1))
VALUE_MEMBERS = ((3, 2, 2, 1), (2, 1, 1), (4, 4, 2))


@pytest.mark.parametrize(
    ("members", "group", "options"),
    [
        (((2, 0), (1,)), 4, {"lengths": [90, 34], "offset": 3}),
        *slow_cases(
            (((2, 0), (1,), (3, 4)), 1, {"window": 40}),
            (((1, 3), (2,), (0,)), 7, {"lengths": [150, 7]}),
            (((1,), (2,), (0,)), 1, {"dtype": torch.bfloat16, "gain": (True, False)}),
            (((0, 1), (2,)), 4, {"rope": None, "sinks": 0}),
            (((1, 0), (2,)), 2, {"dtype": torch.float32}),
            (((1, 0), (2,)), 2, {"joined": True}),
            (((1, 0), (2,)), 2, {"lengths": [9, 4], "recent": 8}),
        ),
    ],
)
def test_heads_with_different_widths(members, group, options):
    count = len(members)
    options = {"lengths": [150], "heads": sum(map(len, members)), "group": group, "members": members} | options
    Case(options.pop("lengths"), KEY_MEMBERS[:count], VALUE_MEMBERS[:count], **options).check()


def test_keys_and_values_with_different_members():
    """Heads are at different places of both: four launches."""
    heads = {"members": ((2, 0), (1, 3)), "value_members": ((3, 0), (2, 1)), "heads": 4}
    Case([90, 34], KEY_MEMBERS[:2], VALUE_MEMBERS[:2], **heads).check()


def alone(case: Case, number: int) -> Case:
    """The heads of member `number` of a case with the same members of keys and values."""
    heads = case.keys.packed.heads[number]

    def of_member(side):
        return replace(side, packed=side.members[number], sinks=side.sinks[:, heads], ring=side.ring[:, heads])

    mine = copy(case)
    mine.sides = [of_member(side) for side in case.sides]
    mine.query = case.query.unflatten(1, (-1, case.query.shape[1] // 3))[:, heads].flatten(1, 2)
    return mine


@pytest.mark.parametrize("packed_programs", [3, *slow(1, 6)])
def test_a_list_of_heads_is_the_same_as_these_heads_alone(packed_programs, monkeypatch):
    """Bit for bit, in as many splits."""
    monkeypatch.setattr("kvq_kernels.transform_attention.launch.programs", lambda *_: (packed_programs, 1))
    case = Case([300, 130], KEY_MEMBERS[:2], VALUE_MEMBERS[:2], heads=3, members=((2, 0), (1,)))
    out = case.run().unflatten(1, (3, -1))
    for number, heads in enumerate(case.keys.packed.heads):
        assert torch.equal(out[:, heads].flatten(1, 2), alone(case, number).run())


def test_arguments_that_do_not_fit_are_refused():
    case, other = Case([40]), Case([40], sinks=4)
    keys, values = case.keys, case.values

    def attend(query=case.query, keys=keys, values=values, lengths=case.lengths, rope=case.rope):
        transform_attention(query, keys, values, lengths, case.scaling, rope=rope)

    def packed(side, **changes):
        return replace(side, packed=replace(side.packed, **changes))

    with pytest.raises(ValueError, match="lengths"):
        attend(lengths=case.lengths[:0])
    with pytest.raises(ValueError, match="query heads"):
        attend(query=case.query[:, :, :24])
    with pytest.raises(ValueError, match="sinks, room"):
        attend(values=other.values)
    with pytest.raises(ValueError, match="made for the rotation"):
        attend(rope=None)
    with pytest.raises(ValueError, match="codes of keys must be"):
        attend(keys=packed(keys, codes=values.packed.codes))
    with pytest.raises(ValueError, match="gain of values must be uint8"):
        attend(values=packed(values, gain=values.packed.gain.int()))
    with pytest.raises(ValueError, match="synthesis of keys"):
        attend(keys=packed(keys, transform=replace(keys.packed.transform, widths=(4, 3, 2))))
    with pytest.raises(ValueError, match="which transform_attention does not read"):
        attend(keys=replace(keys, norm=torch.ones(1, 2, 32)))
    with pytest.raises(ValueError, match="packed as Uniform"):
        attend(keys=replace(keys, packed=Uniform(values.packed.codes[0], case.query, 2, "token", 32)))
    with pytest.raises(ValueError, match="read by transform_attention alone"):
        decode_attention(case.query, keys, values, case.lengths, case.scaling, backend="triton")


def test_members_that_do_not_fit_are_refused():
    case = Case([40], KEY_MEMBERS[:2], VALUE_MEMBERS[:2], heads=3, members=((2, 0), (1,)))
    (first, second), heads = case.keys.members, case.keys.packed.heads
    attend = partial(transform_attention, values=case.values, lengths=case.lengths, scaling=1.0, rope=case.rope)

    def refused(match, *given):
        with pytest.raises(ValueError, match=match):
            attend(case.query, replace(case.keys, packed=PerHead(*given)))

    refused("must be in one member", (first, second), ((2, 0), (0,)))
    refused("must be in one member", (first,), heads)
    refused("over 1 kv heads and 2 transforms", (first, second), ((1,), (2, 0)))
    unrotated = replace(second.transform, operands=replace(second.transform.operands, rotation=None))
    refused("made for the rotation None", (first, replace(second, transform=unrotated)), heads)
    short = Case([90], KEY_MEMBERS[:2], VALUE_MEMBERS[:2], heads=3, members=((2, 0), (1,))).keys.members[1]
    refused("codes of keys must be", (first, short), heads)

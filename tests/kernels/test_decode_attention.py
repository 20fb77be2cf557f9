"""Decode attention by the kernels against float64, for every storage family and window."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import triton.language as tl
from checks import combine
from kernel_cases import (
    CHANNEL,
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
from kvq_kernels.decode_attention import decode_attention
from kvq_kernels.decode_attention.arguments import side_spec
from kvq_kernels.decode_attention.formats.codebook import scalar, vector
from kvq_kernels.decode_attention.formats.directions import KEYS, LOOKED_UP
from kvq_kernels.tuning import trying
from tiers import slow, slow_cases
from triton import knobs
from triton.runtime.interpreter import InterpreterBuilder

pytestmark = pytest.mark.gpu

KIVI = (partial(uniform, axis="channel"), partial(uniform, axis="token"))
INNERQ = (partial(uniform, axis="token"), partial(uniform, axis="channel"))


@pytest.mark.parametrize("lengths", [[1], *slow([7], [63, 64, 65], [300, 5])])
@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.bfloat16, torch.float32)])
def test_dense(lengths, dtype):
    Case(dense, dense, lengths, dtype=dtype).check()


@pytest.mark.parametrize("dim", [80, *slow(96, 128, 256)])
def test_dense_head_dims(dim):
    Case(dense, dense, [150], dim=dim).check()


@pytest.mark.parametrize("group", [1, *slow(3, 4, 8)])
def test_query_heads(group):
    Case(*KIVI, [150], heads=2, group=group, unpacked=(12, 20), sinks=4).check()


@pytest.mark.parametrize("lengths", [[1], [7], *slow([31, 32, 33], [300, 129])])
@pytest.mark.parametrize("sides", [KIVI, INNERQ], ids=["kivi", "innerq"])
def test_uniform(sides, lengths):
    Case(*sides, lengths, unpacked=(12, 20), sinks=4).check()


@pytest.mark.parametrize("bits", [1, *slow(2, 3, 4, 8)])
@pytest.mark.parametrize("sides", [KIVI, *slow(INNERQ)], ids=["kivi", "innerq"])
def test_bits(sides, bits):
    Case(*(partial(make, bits=bits) for make in sides), [140], dim=128).check()


@pytest.mark.parametrize("dim", [80, *slow(96, 256)])
@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.bfloat16)])
def test_uniform_head_dims(dim, dtype):
    Case(*(partial(make, group=16) for make in KIVI), [140], dim=dim, dtype=dtype).check()


@pytest.mark.parametrize("group", [16, *slow(64, 128)])
@pytest.mark.parametrize("sides", [KIVI, *slow(INNERQ)], ids=["kivi", "innerq"])
def test_groups(sides, group):
    Case(*(partial(make, group=group) for make in sides), [200], dim=128).check()


MODES = ["inside", "extra", "hybrid-extra"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sides", [KIVI, *slow(INNERQ)], ids=["kivi", "innerq"])
def test_symmetric_and_hybrid(sides, mode):
    Case(*(partial(make, mode=mode) for make in sides), [140], unpacked=(12, 20), sinks=4).check()


@pytest.mark.parametrize("bits", [1, *slow(2, 3, 4)])
@pytest.mark.parametrize("sides", [KIVI, *slow(INNERQ)], ids=["kivi", "innerq"])
def test_signs_of_bits(sides, bits):
    for dim in (32, 128):
        Case(*(partial(make, bits=bits, mode="hybrid-extra") for make in sides), [140], dim=dim, group=4).check()


def test_queries_are_padded():
    """To as many as AMD's matrix unit takes, without a change of the result."""
    hybrids = [[partial(make, mode="hybrid-extra") for make in sides] for sides in (KIVI, INNERQ)]
    for case in (*(Case(*sides, [140], group=4) for sides in hybrids), Case(*TEMPORAL, [140], **HALF)):
        usual = case.run()
        with trying("decode_attention", {"queries": 16}):
            torch.testing.assert_close(case.run(), usual, rtol=1e-3, atol=1e-4)


def test_readers_of_uniform_codes():
    """All formats that methods write at usual sizes: none is read element by element."""

    def fits(dim, group, **options):
        for axes in (("channel", "token"), ("token", "channel")):
            makers = (partial(uniform, axis=axis, group=group, **options) for axis in axes)
            keys, values = (side_spec(side, dim) for side in Case(*makers, [1], dim=dim).sides)
            tokens = 32 if group >= 32 else 16
            yield keys.key_reader(tokens, "none", 0, tl.float16) is not None
            yield values.value_reader(tokens, tl.float16) is not None

    for dim in (64, 128):
        for bits in (1, 2, 3, 4):
            assert all(fits(dim, 32, bits=bits)) and all(fits(dim, 64, bits=bits))
            for mode in MODES:
                assert all(fits(dim, 32, bits=bits, mode=mode)), (dim, bits, mode)
    assert all(fits(128, 128, bits=2)) and all(fits(128, 128, bits=8))
    keys = side_spec(Case(*KIVI, [1]).sides[0], 64)
    assert keys.key_reader(32, "half", 64, tl.float16) is None and keys.key_reader(8, "none", 0, tl.float16) is None


@pytest.mark.parametrize("lengths", [[1], [7], *slow([63, 65], [300, 140])])
@pytest.mark.parametrize("sides", [TEMPORAL, CHANNEL], ids=["temporal", "channel"])
def test_codebooks(sides, lengths):
    Case(*sides, lengths, **HALF, unpacked=(8, 8), sinks=8).check()


@pytest.mark.parametrize("size", [2, *slow(8)])
@pytest.mark.parametrize("temporal", [True, *slow(False)])
def test_codebook_bits(size, temporal):
    make = partial(codebook, block=(size, 1) if temporal else (1, size), share=size)
    Case(partial(make, normalize=True), make, [290], **HALF).check()


def test_different_blocks():
    Case(partial(codebook, block=(2, 1)), partial(codebook, block=(2, 2)), [200], **HALF).check()
    Case(partial(codebook, block=(1, 4)), codebook, [200], **HALF).check()


@pytest.mark.parametrize("rope", [("half", 32), *slow(("interleaved", 64), ("interleaved", 32))])
def test_rotations(rope):
    Case(*KIVI, [150, 40], rope=rope, rope_scale=1.1, unpacked=(8, 8), sinks=4).check()


@pytest.mark.parametrize("entries", [2, *slow(4, 16)])
def test_scalar_codebooks(entries):
    keys = partial(codebook, block=(1, 1), entries=entries, share=64, normalize=True)
    values = partial(codebook, block=(1, 1), entries=entries, share=64, per_token=True)
    Case(keys, values, [140], **HALF, unpacked=(8, 8), sinks=1).check()


@pytest.mark.parametrize("dim", [64, *slow(80, 96, 128, 256)])
@pytest.mark.parametrize("bits", [1, *slow(2, 3, 4)])
def test_bits_of_scalar_codebooks(bits, dim):
    Case(*scalars(bits, dim), [140], dim=dim, rope=("half", dim), offset=3, unpacked=(8, 8), sinks=1).check()


@pytest.mark.parametrize("bits", [2, *slow(3, 4)])
@pytest.mark.parametrize("lengths", [[1], *slow([7], [65, 63], [200])])
def test_lengths_of_scalar_codebooks(bits, lengths):
    Case(*scalars(bits), lengths, **HALF, unpacked=(8, 20), sinks=8).check()


@pytest.mark.parametrize("group", [1, *slow(4, 8)])
@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.bfloat16, torch.float32)])
def test_query_heads_of_scalar_codebooks(group, dtype):
    Case(*scalars(2), [140], heads=2, group=group, dtype=dtype, **HALF, unpacked=(8, 8)).check()


@pytest.mark.parametrize(("bits", "rope"), [(2, None), *slow_cases((4, None), (2, ("half", 16)), (4, ("half", 64)))])
def test_partial_rotations_of_scalar_codebooks(bits, rope):
    Case(*scalars(bits, 128), [150], dim=128, rope=rope, rope_scale=1.1, offset=3).check()


def test_scalar_codebooks_with_other_storage():
    keys, values = scalars(2)
    Case(keys, codebook, [200], **HALF, unpacked=(8, 8)).check()
    Case(TEMPORAL[0], values, [200], **HALF, unpacked=(8, 8)).check()
    Case(dense, values, [200]).check()


@pytest.mark.parametrize("bits", [2, 4, *slow(1, 3)])
@pytest.mark.parametrize("dim", [64, *slow(80, 128)])
def test_directions(bits, dim):
    keys, values = partial(directions, bits=bits), partial(uniform, axis="token", group=16 if dim == 80 else 32)
    Case(keys, values, [150, 40], dim=dim, unpacked=(8, 8), sinks=8).check()


@pytest.mark.parametrize("unit", [True, False])
def test_directions_of_values_and_before_rope(unit):
    """Which are read element by element."""
    make = partial(directions, unit=unit)
    Case(make, make, [70], unpacked=(8, 8), sinks=8).check()
    Case(make, dense, [70], **HALF).check()


def test_readers_of_directions():
    def reader(dim=64, style="none", dtype=tl.float16, **options):
        return side_spec(Case(partial(directions, **options), dense, [1], dim=dim).sides[0], dim).key_reader(
            32, style, dim, dtype
        )

    assert reader() is reader(dim=128, bits=2) is LOOKED_UP
    assert reader(dim=80) is reader(bits=1) is reader(dtype=tl.float32) is KEYS
    assert reader(style="half") is None


def test_readers_of_codebooks():
    def side(make, dim=128):
        return side_spec(Case(make, dense, [1], dim=dim).sides[0], dim)

    for bits in (2, 3, 4):
        keys, values = (side(make) for make in scalars(bits, 128))
        assert keys.key_reader(128, "half", 128, tl.float16) is scalar.KEYS
        assert values.value_reader(128, tl.float16) is scalar.VALUES
        assert keys.key_reader(128, "interleaved", 128, tl.float16) is None
        assert keys.key_reader(128, "half", 128, tl.float32) is None
    assert side(scalars(2, 80)[0], 80).key_reader(128, "half", 80, tl.float16) is None
    assert side(TEMPORAL[0]).key_reader(128, "half", 128, tl.float16) is vector.KEYS
    assert side(TEMPORAL[0]).key_reader(128, "interleaved", 128, tl.float16) is None


@pytest.mark.parametrize("dim", [16, *slow(80)])
def test_head_dims_of_vector_codebooks(dim):
    make = partial(codebook, normalize=True)
    Case(make, codebook, [150], dim=dim, rope=("half", dim), unpacked=(8, 8), sinks=8).check()


def test_small_heads():
    Case(*(partial(make, group=16) for make in KIVI), [140, 9], dim=16, rope=("half", 16), unpacked=(12, 20)).check()
    Case(dense, dense, [140, 9], dim=16).check()


def test_different_storage_per_head():
    keys = partial(per_head, makers=TEMPORAL[:1] + CHANNEL[:1], heads=((0, 2), (1,)))
    values = partial(per_head, makers=CHANNEL[:1] + TEMPORAL[1:], heads=((1,), (0, 2)))
    lists = (random_outliers, random_outliers)
    Case(keys, values, [150, 40], heads=3, group=2, **HALF, outliers=lists, unpacked=(8, 8), sinks=8).check()
    Case(keys, dense, [150], heads=3, group=1, **HALF).check()


@pytest.mark.parametrize("window", [1, 7, *slow(100, 170, 290, 1000)])
def test_sliding_windows(window):
    Case(*KIVI, [300, 50], unpacked=(12, 20), sinks=4, window=window).check()


def test_keys_with_a_norm():
    Case(*INNERQ, [200, 3], heads=2, unpacked=(12, 20), sinks=4, norm=True).check()


@pytest.mark.parametrize("splits", [1, *slow(3, 40)])
def test_splits(splits):
    Case(*KIVI, [300], unpacked=(12, 20)).check(splits)
    Case(dense, dense, [300]).check(splits)


@pytest.mark.parametrize("count", [1, 2, 9, 65, 1025])
def test_splits_are_combined(count):
    combine.check(count)


@pytest.mark.parametrize("dim", [80, *slow(512)])
def test_splits_of_other_head_dims_are_combined(dim):
    combine.check(70, dim=dim)


def test_wide_heads_of_vector_codebooks():
    Case(*CHANNEL, [300], dim=128, rope=("half", 128)).check()


def test_workspace_is_optional():
    case = Case(*KIVI, [100])
    args = (case.query, *case.sides, case.lengths, case.scaling)
    torch.testing.assert_close(decode_attention(*args, backend="triton"), case.run(), atol=1e-3, rtol=1e-3)


def test_tables_of_cosines_end_at_the_last_token(monkeypatch):
    """The tail's last tile is longer than the row: no cosines of later positions are read."""
    case = Case(*KIVI, [126], rope=("half", 64), offset=2, unpacked=(12, 20), sinks=4)
    coarse = case.rope.coarse
    if not knobs.runtime.interpret:
        case.rope = replace(case.rope, coarse=coarse[:1].clone())  # the PTX executor reports reads behind a tensor
        return case.check()
    load, begin, end = InterpreterBuilder.create_masked_load, coarse[1:].data_ptr(), coarse.data_ptr() + coarse.nbytes

    def checked_load(builder, pointers, mask, *others):
        read = pointers.data[mask.data.astype(bool)]
        assert not ((read >= begin) & (read < end)).any()
        return load(builder, pointers, mask, *others)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", checked_load)
    case.check()


def test_empty_row_is_zero():
    case = Case(*KIVI, [0, 40])
    assert (case.run()[0] == 0).all()


@pytest.mark.parametrize(
    ("splits", "busy"), [(1, [3, 3, 1]), *slow_cases((7, [2 + 2 + 4, 0 + 4 + 1, 1]), (30, [4 + 5 + 4, 0 + 4 + 1, 1]))]
)
def test_programs_share_the_tokens(splits, busy):
    """By how long they take: a mixed token 16 times as long as one of a whole tile, an exact one three times.

    Row 0 has 4 tiles of 32 tokens, 5 exact and 4 mixed tiles of 16; row 1 0, 4 and 1; row 2 one of exact tokens.
    """
    case = Case(*KIVI, [250, 70, 3], unpacked=(40, 100), sinks=20)
    case.check(splits)
    assert case.workspace.logsum[:, 0].isfinite().sum(1).tolist() == busy

"""Attention over kept layer inputs in the interpreter against float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernel_cases import dense, uniform
from kvq_kernels.decode_attention import Rope, Side
from kvq_kernels.rematerialize import Latents, Norm, Workspace, rematerialize
from kvq_kernels.rematerialize.reference import rematerialize_reference

CHANNEL, TOKEN = partial(uniform, axis="channel"), partial(uniform, axis="token")


class Case:
    """Rows of `lengths` tokens, of which `waiting` beyond the sinks are not packed; packed ones are whole groups."""

    def __init__(self, lengths, keys=CHANNEL, values=TOKEN, rank=64, value_rank=None, dim=32, heads=1, group=2,
                 dtype=torch.float16, sinks=0, waiting=0, flush=32, rope="half", turned=None, offset=0, bias=False,
                 norm=None, first=False, shared=False, window=None, seed=0):  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        rows, self.dtype, self.window, size = len(lengths), dtype, window, heads * dim
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.query = torch.randn(rows, heads * group, dim, generator=g).to(dtype)
        count = ((self.lengths - sinks - waiting).clamp_min(0) // flush * flush).int()
        room, slots = max(32, -(-max(lengths) // 32) * 32), waiting + flush
        kept = dtype if dtype != torch.float32 else torch.float16

        def random(*shape):
            return torch.randn(*shape, generator=g).to(dtype)

        def latents(make, rank, first=False, held=None):
            if held is None:
                packed = make(g, (rows, 1, room, rank - first), kept)
                held = Side(
                    packed, count, random(rows, 1, sinks, rank) if sinks else None, random(rows, 1, slots, rank)
                )
            weight = random(size, rank).T / rank**0.5  # as a model holds it
            own = random(rows, 1, room, 1) if first else None
            return Latents(held, weight.to(dtype), random(size) if bias else None, first=own)

        self.keys = latents(keys, rank, first)
        self.values = latents(values, value_rank or rank, held=self.keys.held if shared else None)
        if norm is not None:
            own = Norm(norm, torch.rand(heads, dim, generator=g) + 0.5, 1e-3)
            self.keys = Latents(self.keys.held, self.keys.weight, self.keys.bias, own, self.keys.first)
        self.rope = None
        if rope is not None:
            width = turned or dim
            offsets = torch.full((rows,), offset, dtype=torch.int32) if offset else None
            frequencies = 10000.0 ** (-torch.arange(width // 2) * 2 / width)
            self.rope = Rope.tables(rope, frequencies, room + 256, scale=1.1, offset=offsets)
        self.scaling = dim**-0.5

    def run(self, span: int = 128, splits: int = 2) -> torch.Tensor:
        """By the kernels, with nothing but NaN in what they write to."""
        workspace = Workspace.like(self.query, self.values.rank, span, splits)
        out = torch.full_like(self.query, torch.nan)
        for poisoned in (workspace.scores, workspace.partial, workspace.logsum):
            poisoned.fill_(torch.nan)
        args = (self.query, self.keys, self.values, self.lengths, self.scaling)
        own = {"rope": self.rope, "window": self.window}
        return rematerialize(*args, **own, workspace=workspace, out=out, backend="triton")

    def reference(self, dtype: torch.dtype, held: torch.dtype | None = None) -> torch.Tensor:
        args = (self.query, self.keys, self.values, self.lengths, self.scaling, self.rope, self.window)
        return rematerialize_reference(*args, dtype, held)

    def check(self, span: int = 128, splits: int = 2) -> None:
        """Not more than twice the error of PyTorch in the model's type, both against float64."""
        exact, out = self.reference(torch.float64), self.run(span, splits)
        assert out.isfinite().all()
        torch_error = (self.reference(torch.float32, self.dtype).to(self.dtype) - exact).norm() / exact.norm()
        error = (out - exact).norm() / exact.norm()
        floor = torch.finfo(self.dtype).eps / 4
        assert error <= 2 * max(torch_error, floor), f"error {error:.3g}, PyTorch's {torch_error:.3g}"


@pytest.mark.parametrize("lengths", [[1], [7], [31, 32, 33], [300, 5, 129]])
@pytest.mark.parametrize("keys", [CHANNEL, TOKEN, dense], ids=["channel", "token", "dense"])
def test_lengths(keys, lengths):
    values = dense if keys is dense else TOKEN
    Case(lengths, keys, values, sinks=3, waiting=2).check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", [1, 2])
def test_types(dtype, seed):
    Case([150, 40], dtype=dtype, waiting=9, bias=True, seed=seed).check()


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rank", [64, 80])
def test_bits(bits, rank):
    """80 channels are no whole number of words at 1 and 3 bits."""
    keys, values = (partial(make, bits=bits, group=16) for make in (CHANNEL, TOKEN))
    Case([150], keys, values, rank=rank, flush=16).check()


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128])
def test_head_dims(dim):
    Case([70], rank=128, dim=dim).check()


@pytest.mark.parametrize(("heads", "group"), [(2, 1), (2, 4), (1, 8), (2, 3)])
def test_query_heads(heads, group):
    Case([100, 64], heads=heads, group=group, waiting=4).check()


@pytest.mark.parametrize("turn", [("half", 16), ("interleaved", 32), ("interleaved", 16), (None, None)])
def test_rotations(turn):
    style, turned = turn
    Case([100, 40], rope=style, turned=turned, offset=3 if style else 0, sinks=2, waiting=4).check()


@pytest.mark.parametrize("norm", ["rms", "layer"])
@pytest.mark.parametrize("dim", [32, 80])
def test_norms(norm, dim):
    Case([100], heads=2, dim=dim, norm=norm, bias=True, sinks=2, waiting=4).check()


def test_one_store_for_keys_and_values():
    Case([150, 33], TOKEN, shared=True, heads=2, group=1, waiting=3).check()


def test_ranks_may_differ():
    Case([100], rank=48, value_rank=96).check()


@pytest.mark.parametrize("bits", [2, 3])
def test_first_channel(bits):
    Case([100], partial(CHANNEL, bits=bits), rank=64, first=True, sinks=2, waiting=4).check()


@pytest.mark.parametrize(("group", "flush"), [(128, 128), (8, 8), (48, 48)])
def test_groups_of_tokens(group, flush):
    Case([300, 90], partial(CHANNEL, group=group), flush=flush, waiting=4).check()


@pytest.mark.parametrize("group", [8, 64])
def test_groups_of_channels(group):
    Case([100], partial(TOKEN, group=group), partial(TOKEN, group=group)).check()


@pytest.mark.parametrize(("span", "splits"), [(128, 1), (256, 5), (1024, 3)])
def test_spans_and_splits(span, splits):
    Case([300, 140], sinks=2, waiting=4).check(span, splits)


@pytest.mark.parametrize("window", [1, 20, 100])
def test_sliding_windows(window):
    Case([140, 7], sinks=2, waiting=4, window=window).check()


def test_empty_row_is_zero():
    case = Case([0, 40], bias=True)
    assert (case.run()[0] == 0).all()
    case.check()


def test_the_workspace_may_be_made_by_the_call():
    case = Case([100])
    args = (case.query, case.keys, case.values, case.lengths, case.scaling)
    found = rematerialize(*args, rope=case.rope, backend="triton")
    torch.testing.assert_close(found, case.run(), atol=1e-3, rtol=1e-3)


def test_shapes_that_do_not_fit_are_refused():
    case = Case([100], norm="rms")
    with pytest.raises(ValueError, match="lengths"):
        rematerialize(case.query, case.keys, case.values, case.lengths[:0], case.scaling)
    with pytest.raises(ValueError, match="query heads"):
        rematerialize(case.query[:, :, :24], case.keys, case.values, case.lengths, case.scaling)
    with pytest.raises(ValueError, match="neither a norm"):
        rematerialize(case.query, case.values, case.keys, case.lengths, case.scaling)

"""Random layer inputs, and whether attention over them by the kernels is as good as PyTorch's against float64."""

from __future__ import annotations

from functools import partial

import torch
from kernel_cases import at_most_twice, uniform
from kvq_kernels.decode_attention import Rope, Side
from kvq_kernels.rematerialize import Latents, Norm, Workspace, rematerialize
from kvq_kernels.rematerialize.reference import rematerialize_reference

CHANNEL, TOKEN = partial(uniform, axis="channel"), partial(uniform, axis="token")


class Case:
    """Rows of `lengths` tokens, of which `waiting` beyond the sinks are not packed; packed ones are whole groups.
    folded: weights are products S B^T of their own, not views of a model's."""

    def __init__(self, lengths, keys=CHANNEL, values=TOKEN, rank=64, value_rank=None, dim=32, heads=1, group=2,
                 dtype=torch.float16, sinks=0, waiting=0, flush=32, rope="half", turned=None, offset=0, bias=False,
                 norm=None, first=False, shared=False, folded=False, window=None, seed=0):  # fmt: skip
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
            weight = weight.contiguous() if folded else weight
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
        at_most_twice(out, self.reference(torch.float32, self.dtype).to(self.dtype), exact)

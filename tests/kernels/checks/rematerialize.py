"""Random layer inputs, and a check that attention over them by the kernels is as good as PyTorch's."""

from __future__ import annotations

from functools import partial

import torch
from kernel_cases import assert_error_at_most_twice, uniform
from kvq_kernels.decode_attention import Rope, Side
from kvq_kernels.rematerialize import Latents, Norm, Workspace, rematerialize
from kvq_kernels.rematerialize.reference import rematerialize_reference

CHANNEL, TOKEN = partial(uniform, axis="channel"), partial(uniform, axis="token")


class Case:
    """Random cache with rows of `lengths` tokens: sinks, packed tokens in whole groups, and `unpacked` recent ones.

    contiguous: weights are products S B^T, not transposed views of a model's.
    """

    def __init__(self, lengths, keys=CHANNEL, values=TOKEN, rank=64, value_rank=None, dim=32, heads=1, group=2,
                 dtype=torch.float16, sinks=0, unpacked=0, flush=32, rope="half", rotated=None, offset=0, bias=False,
                 norm=None, first=False, shared=False, contiguous=False, window=None, seed=0):  # fmt: skip
        g = torch.Generator().manual_seed(seed)
        rows, self.dtype, self.window, size = len(lengths), dtype, window, heads * dim
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.query = torch.randn(rows, heads * group, dim, generator=g).to(dtype)
        count = ((self.lengths - sinks - unpacked).clamp_min(0) // flush * flush).int()
        room, ring_size = max(32, -(-max(lengths) // 32) * 32), unpacked + flush
        stored_dtype = dtype if dtype != torch.float32 else torch.float16

        def random(*shape):
            return torch.randn(*shape, generator=g).to(dtype)

        def latents(make, rank, first=False, held=None):
            if held is None:
                packed = make(g, (rows, 1, room, rank - first), stored_dtype)
                held = Side(
                    packed, count, random(rows, 1, sinks, rank) if sinks else None, random(rows, 1, ring_size, rank)
                )
            weight = random(size, rank).T / rank**0.5  # transposed, as in a model
            weight = weight.contiguous() if contiguous else weight
            first_channel = random(rows, 1, room, 1) if first else None
            return Latents(held, weight.to(dtype), random(size) if bias else None, first=first_channel)

        self.keys = latents(keys, rank, first)
        self.values = latents(values, value_rank or rank, held=self.keys.held if shared else None)
        if norm is not None:
            key_norm = Norm(norm, torch.rand(heads, dim, generator=g) + 0.5, 1e-3)
            self.keys = Latents(self.keys.held, self.keys.weight, self.keys.bias, key_norm, self.keys.first)
        self.rope = None
        if rope is not None:
            width = rotated or dim
            offsets = torch.full((rows,), offset, dtype=torch.int32) if offset else None
            frequencies = 10000.0 ** (-torch.arange(width // 2) * 2 / width)
            self.rope = Rope.tables(rope, frequencies, room + 256, scale=1.1, offset=offsets)
        self.scaling = dim**-0.5

    def run(self, span: int = 128, splits: int = 2) -> torch.Tensor:
        """Output of the kernels; their buffers are filled with NaN before."""
        workspace = Workspace.like(self.query, self.values.rank, span, splits)
        out = torch.full_like(self.query, torch.nan)
        for poisoned in (workspace.scores, workspace.partial, workspace.logsum):
            poisoned.fill_(torch.nan)
        args = (self.query, self.keys, self.values, self.lengths, self.scaling)
        options = {"rope": self.rope, "window": self.window}
        return rematerialize(*args, **options, workspace=workspace, out=out, backend="triton")

    def reference(self, dtype: torch.dtype, round_to: torch.dtype | None = None) -> torch.Tensor:
        args = (self.query, self.keys, self.values, self.lengths, self.scaling, self.rope, self.window)
        return rematerialize_reference(*args, dtype, round_to)

    def check(self, span: int = 128, splits: int = 2) -> None:
        """Assert at most twice PyTorch's error in the model's type, against float64."""
        exact, out = self.reference(torch.float64), self.run(span, splits)
        assert_error_at_most_twice(out, self.reference(torch.float32, self.dtype).to(self.dtype), exact)

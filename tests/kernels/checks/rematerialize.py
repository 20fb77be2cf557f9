"""Random layer inputs, and a check that attention over them by the kernels is as good as PyTorch's."""

from __future__ import annotations

from functools import partial

import torch
from checks.spans import SpanCase
from kernel_cases import uniform
from kvq_kernels.decode_attention import Side
from kvq_kernels.rematerialize import Latents, Norm, Workspace, rematerialize
from kvq_kernels.rematerialize.reference import rematerialize_reference

CHANNEL, TOKEN = partial(uniform, axis="channel"), partial(uniform, axis="token")


class Case(SpanCase):
    """Random cache with rows of `lengths` tokens: sinks, packed tokens in whole groups, and `unpacked` recent ones.

    contiguous: weights are products S B^T, not transposed views of a model's.
    """

    operation, reference_of, workspace_of = rematerialize, rematerialize_reference, Workspace.like

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
        self.make_rope(rope, rotated or dim, offset, room)
        self.scaling = dim**-0.5

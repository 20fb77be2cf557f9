"""Check of the combination of splits against float64."""

from __future__ import annotations

import torch
from kernel_cases import DEVICE
from kvq_kernels.decode_attention.launch import Workspace, combine


def check(count: int, rows: int = 2, heads: int = 3, dim: int = 128) -> None:
    """Of random splits, two thirds of them empty; all of them for one query head, and all but the last for another."""
    g = torch.Generator().manual_seed(count)
    partial = torch.randn(rows, heads, count, dim, generator=g)
    logsum = 30 * torch.randn(rows, heads, count, generator=g)
    logsum[torch.rand(logsum.shape, generator=g) < 2 / 3] = -torch.inf
    logsum[0, 1] = -torch.inf
    logsum[-1, 0, :-1], logsum[-1, 0, -1] = -torch.inf, -1000.0
    weights = torch.exp2(logsum.double() - logsum.double().amax(-1, keepdim=True).nan_to_num(neginf=0.0))
    expected = (weights.unsqueeze(-1) * partial.double()).sum(2) / weights.sum(-1, keepdim=True).clamp_min(1e-300)
    partial[logsum == -torch.inf] = torch.nan  # empty splits are not written
    workspace = Workspace(partial.to(DEVICE), logsum.to(DEVICE))
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-3)):
        out = torch.full((rows, heads, dim), torch.nan, dtype=dtype, device=DEVICE)
        combine(workspace, out)
        torch.testing.assert_close(out.double(), expected.to(DEVICE), rtol=tolerance, atol=tolerance / 10)
        assert (out[0, 1] == 0).all()

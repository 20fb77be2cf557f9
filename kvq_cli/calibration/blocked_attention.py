"""Causal attention for training and calibration on a CPU: plain matrix products over blocks of queries.

Its products run at the full bfloat16 rate, which PyTorch's flash kernel for CPUs does not reach: forward and backward
together take half its time at 256 to 1024 tokens. Nothing above a block's diagonal is computed.
"""

from __future__ import annotations

import torch

NAME = "kvq_blocked"
BLOCK = 256


def attention(module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, **options):
    """`query` ``[rows, heads, tokens, head_dim]``, `key` and `value` with fewer heads; no padding, no dropout.

    Returns ``[rows, tokens, heads, head_dim]`` and None for the weights, as transformers asks. Raises ValueError for
    what some models add to attention and this does not compute.
    """
    if unknown := [name for name in ("softcap", "s_aux") if options.get(name) is not None]:
        raise ValueError(f"attention by blocks has no {', '.join(unknown)}")
    rows, heads, tokens, width = query.shape
    groups = heads // key.shape[1]
    query = query * scaling
    found = []
    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        part = query[:, :, start:end].reshape(rows, -1, groups * (end - start), width)
        scores = (part @ key[:, :, :end].transpose(-1, -2)).view(rows, -1, groups, end - start, end)
        future = torch.full((end - start, end), float("-inf"), dtype=scores.dtype, device=scores.device)
        weights = torch.softmax(scores + future.triu(1 + start), dim=-1).to(value.dtype)
        out = weights.view(rows, -1, groups * (end - start), end) @ value[:, :, :end]
        found.append(out.view(rows, heads, end - start, width))
    return torch.cat(found, dim=2).transpose(1, 2).contiguous(), None


def register() -> None:
    """Make `NAME` known to transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)

"""Causal attention with gradients on a CPU, as plain matrix products over blocks of queries.

The products run at the full bfloat16 rate, unlike PyTorch's flash kernel for CPUs: forward and backward together take
half the time at 256 to 1024 tokens. Blocks above the diagonal are skipped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

NAME = "kvq_blocked"
BLOCK = 256


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, None]:
    """Causal attention of `query` `[batch, query_heads, tokens, head_dim]`, without padding or dropout.

    `key` and `value` may have fewer heads. scaling: of the scores; None: 1 / sqrt(head_dim). Returns the output
    `[batch, tokens, query_heads, head_dim]` and None for the weights, as transformers expects. Raises ValueError for
    logit soft-capping and attention sinks (`s_aux`), which are not implemented.
    """
    if unknown := [name for name in ("softcap", "s_aux") if options.get(name) is not None]:
        raise ValueError(f"blocked attention does not implement {', '.join(unknown)}")
    batch, heads, tokens, head_dim = query.shape
    groups = heads // key.shape[1]
    query = query * (head_dim**-0.5 if scaling is None else scaling)
    blocks = []
    for start in range(0, tokens, BLOCK):
        end = min(start + BLOCK, tokens)
        block = query[:, :, start:end].reshape(batch, -1, groups * (end - start), head_dim)
        scores = (block @ key[:, :, :end].transpose(-1, -2)).view(batch, -1, groups, end - start, end)
        future = torch.full((end - start, end), float("-inf"), dtype=scores.dtype, device=scores.device)
        weights = torch.softmax(scores + future.triu(1 + start), dim=-1).to(value.dtype)
        out = weights.view(batch, -1, groups * (end - start), end) @ value[:, :, :end]
        blocks.append(out.view(batch, heads, end - start, head_dim))
    return torch.cat(blocks, dim=2).transpose(1, 2).contiguous(), None


def register() -> None:
    """Register this attention with transformers under `NAME`."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attention)

"""Variants of softmax attention: logit soft-capping and attention sinks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ScoreForm:
    """softcap c: scores are c tanh(s / c) (Gemma 2). sinks: `[query_heads]`, a logit per head that takes part in the
    softmax without a value (GPT-OSS)."""

    softcap: float | None = None
    sinks: Tensor | None = None

    @classmethod
    def of(cls, softcap: float | None, sinks: Tensor | None) -> ScoreForm:
        """`PLAIN` where there is neither."""
        return PLAIN if softcap is None and sinks is None else cls(softcap, sinks)

    @property
    def unusual(self) -> str | None:
        """The difference from a plain softmax, for messages; None: there is none."""
        if self.softcap is not None:
            return "its scores are capped"
        return None if self.sinks is None else "its softmax has a logit without a value"

    def capped(self, scores: Tensor) -> Tensor:
        """The scores with the softcap applied."""
        return scores if self.softcap is None else self.softcap * torch.tanh(scores / self.softcap)

    def weights(self, scores: Tensor) -> Tensor:
        """Attention weights of capped scores `[rows, kv_heads, group, ..., tokens]`; they add up to 1, less the share
        of the sink."""
        if self.sinks is None:
            return scores.softmax(dim=-1)
        return torch.cat([scores, self.sink_logits(scores)], dim=-1).softmax(dim=-1)[..., :-1]

    def sink_logits(self, scores: Tensor) -> Tensor:
        """The sinks' logits `[rows, kv_heads, group, ..., 1]` for scores `[rows, kv_heads, group, ..., tokens]`."""
        if self.sinks is None:
            raise ValueError("this softmax has no sinks")
        logits = self.sinks.to(scores.dtype).view(1, *scores.shape[1:3], *[1] * (scores.ndim - 4))
        return logits.expand(scores.shape[:-1]).unsqueeze(-1)

    def attention(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
        """`query` `[batch, heads, tokens, head_dim]`, `key` and `value` with fewer heads -> `[batch, tokens, heads,
        head_dim]`. mask: as PyTorch takes it; None: causal where there are several queries."""
        q = query.unflatten(1, (key.shape[1], -1))
        scores = self.capped((q @ key.unsqueeze(2).transpose(3, 4)).float() * scaling)
        if mask is None and query.shape[2] > 1:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        if mask is not None:
            visible = mask.unsqueeze(1) if mask.ndim == 4 else mask
            lowest = torch.finfo(scores.dtype).min
            scores = scores.masked_fill(~visible, lowest) if mask.dtype == torch.bool else scores + visible
        out = self.weights(scores).to(value.dtype) @ value.unsqueeze(2)
        return out.flatten(1, 2).transpose(1, 2).contiguous()


PLAIN = ScoreForm()

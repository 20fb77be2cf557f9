"""KL divergence, loss and top-1 agreement between the predictions of two models on the same tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LOGITS_PER_CHUNK = 1 << 24
"""Logits converted to float32 at a time: 64 MiB, whatever the vocabulary and length."""
LOGITS_PER_CHUNK_CPU = 1 << 19
"""On a CPU 2 MiB, which stay in a core's cache: a third of the time."""


@dataclass(frozen=True)
class Divergence:
    """Sums over `tokens` predicted tokens, in nats; p is the reference model's distribution, q the tested one's.

    nll, nll_reference: -ln q(x_t) and -ln p(x_t) of the actual tokens.
    kl:                 KL(p || q) = sum_v p_v (ln p_v - ln q_v).
    agreeing:           tokens for which p and q have the same most probable token.
    """

    tokens: int
    nll: float
    nll_reference: float
    kl: float
    agreeing: int


def rows_per_chunk(logits: Tensor) -> int:
    """Rows of `logits` `[rows, vocabulary]` to convert to float32 at a time."""
    numbers = LOGITS_PER_CHUNK_CPU if logits.device.type == "cpu" else LOGITS_PER_CHUNK
    return max(1, numbers // logits.shape[-1])


def divergence(reference: Tensor, logits: Tensor, ids: Tensor, unscored: int | None = None) -> Divergence:
    """KL divergence, losses and top-1 agreement of q = softmax(logits) and p = softmax(reference).

    reference, logits: `[tokens - 1, vocabulary]` or longer, any float dtype; ids: `[tokens]`. Position t predicts token
    t + 1. unscored: a token whose predictions are left out of all sums.
    """
    rows = rows_per_chunk(logits)
    sums = torch.zeros(4, dtype=torch.float64)
    for start in range(0, len(ids) - 1, rows):
        end = min(start + rows, len(ids) - 1)
        target = ids[start + 1 : end + 1, None].to(logits.device)
        p, q = reference[start:end].to(logits.device), logits[start:end]
        if unscored is not None:
            scored = target[:, 0] != unscored
            target, p, q = target[scored], p[scored], q[scored]
        log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
        sums += torch.stack(
            [
                -log_q.gather(1, target).double().sum(),
                -log_p.gather(1, target).double().sum(),
                (log_p.exp() * (log_p - log_q)).sum(-1).double().sum(),
                # On a CPU, `max` takes a third of the time of `argmax`.
                (log_p.max(-1).indices == log_q.max(-1).indices).double().sum(),
            ]
        ).cpu()
    nll, nll_reference, kl, agreeing = sums.tolist()
    tokens = len(ids) - 1 if unscored is None else int((ids[1:] != unscored).sum())
    return Divergence(tokens, nll, nll_reference, kl, int(agreeing))

"""Summed cross entropy of many logits, without a float32 copy of them: a vocabulary's logits are a sample's largest
tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ROWS = 128  # tokens whose logits are held in float32 at a time


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """-sum_t ln softmax(logits_t)[target_t], float32 scalar, computed in float32; its gradient has the logits' dtype.

    logits: `[tokens, vocabulary]`. targets: int64, one per token; later tokens, without a target, do not count.
    """
    return _SummedCrossEntropy.apply(logits, targets)  # type: ignore[no-untyped-call,no-any-return]


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        normalizers, loss = [], logits.new_zeros((), dtype=torch.float32)
        for rows, target in zip(logits[: len(targets)].split(_ROWS), targets.split(_ROWS), strict=True):
            scores = rows.float()
            normalizers.append(scores.logsumexp(dim=-1))
            loss += (normalizers[-1] - scores.gather(-1, target[:, None]).squeeze(-1)).sum()
        ctx.save_for_backward(logits, targets, torch.cat(normalizers))
        return loss

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        logits, targets, normalizers = ctx.saved_tensors
        gradient = torch.empty_like(logits)
        gradient[len(targets) :] = 0
        for start in range(0, len(targets), _ROWS):
            rows = slice(start, min(start + _ROWS, len(targets)))
            # d loss / d logits = softmax(logits) - one_hot(target)
            difference = logits[rows].float().sub_(normalizers[rows, None]).exp_()
            difference.scatter_add_(-1, targets[rows, None], difference.new_full((len(difference), 1), -1.0))
            gradient[rows] = difference.mul_(gradients[0])
        return gradient, None

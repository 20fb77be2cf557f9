"""Cross entropy over the vocabulary in chunks, its gradient made on the way."""

from __future__ import annotations

import torch


class ChunkedCrossEntropy(torch.autograd.Function):
    """``sum_t w_t * -log softmax(head @ h_t)[y_t]`` without ever holding the logits of all tokens.

    The gradient of a chunk's logits, ``w * (p - onehot)``, is made in the place of its probabilities at once and
    pulled back through the output matrix, so that one buffer of ``chunk x vocabulary`` is all that is needed.
    """

    @staticmethod
    def forward(ctx, hidden, head, targets, weights, chunk=512):
        """`hidden` ``[tokens, width]``, `head` ``[vocabulary, width]``, `targets` and `weights` ``[tokens]``."""
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        into_hidden, into_head = torch.empty_like(hidden), torch.zeros_like(head, dtype=torch.float32)
        matrix = head.to(hidden.dtype)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            h, y, w = hidden[part], targets[part, None], weights[part]
            probabilities = torch.softmax((h @ matrix.T).float(), dim=-1)
            picked = probabilities.gather(1, y)
            total -= (picked.clamp_min(1e-30).log().squeeze(1) * w).sum()
            probabilities.scatter_(1, y, picked - 1).mul_(w[:, None])
            slope = probabilities.to(hidden.dtype)
            torch.mm(slope, matrix, out=into_hidden[part])
            into_head += slope.T @ h
        ctx.save_for_backward(into_hidden, into_head.to(head.dtype))
        return total

    @staticmethod
    def backward(ctx, slope):
        """Scale the gradients that `forward` made."""
        into_hidden, into_head = ctx.saved_tensors
        return into_hidden * slope, into_head * slope, None, None, None


def loss_of(model, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of the cross entropies of ``ids[:, 1:]``."""
    return cross_entropy(model, model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state, ids, weights)


def cross_entropy(model, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`loss_of` from the last hidden states, in their dtype."""
    return ChunkedCrossEntropy.apply(
        hidden.flatten(0, 1), model.lm_head.weight, ids[:, 1:].flatten(), weights.flatten(), 512
    )

"""Cross entropy over the vocabulary in chunks, which computes its gradient in the forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM


class ChunkedCrossEntropy(torch.autograd.Function):
    """`sum_t w_t * -log softmax(head @ h_t)[y_t]` without storing the logits of all tokens.

    The gradient of a chunk's logits, `w * (p - onehot)`, overwrites its probabilities and is multiplied with the output
    matrix at once, so that a single buffer of `chunk x vocabulary` is enough.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, weights: Tensor, chunk: int = 512) -> Tensor:
        """The loss for `hidden` `[tokens, width]`, `head` `[vocabulary, width]`, `targets` and `weights` `[tokens]`."""
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        hidden_grad, head_grad = torch.empty_like(hidden), torch.zeros_like(head, dtype=torch.float32)
        matrix = head.to(hidden.dtype)
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            h, y, w = hidden[part], targets[part, None], weights[part]
            probabilities = torch.softmax((h @ matrix.T).float(), dim=-1)
            picked = probabilities.gather(1, y)
            total -= (picked.clamp_min(1e-30).log().squeeze(1) * w).sum()
            probabilities.scatter_(1, y, picked - 1).mul_(w[:, None])
            logits_grad = probabilities.to(hidden.dtype)
            torch.mm(logits_grad, matrix, out=hidden_grad[part])
            head_grad += logits_grad.T @ h
        ctx.save_for_backward(hidden_grad, head_grad.to(head.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that `forward` computed, scaled."""
        hidden_grad, head_grad = ctx.saved_tensors
        return hidden_grad * scale, head_grad * scale, None, None, None


def loss_of(model: LlamaForCausalLM, ids: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the cross entropies of `ids[:, 1:]`."""
    return cross_entropy(model, model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state, ids, weights)


def cross_entropy(model: LlamaForCausalLM, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """`loss_of`, computed from the last hidden states in their dtype."""
    return ChunkedCrossEntropy.apply(
        hidden.flatten(0, 1), model.lm_head.weight, ids[:, 1:].flatten(), weights.flatten(), 512
    )

"""Muon: momentum with orthogonalized updates, https://kellerjordan.github.io/posts/muon/

`torch.optim.Muon` processes one matrix after the other, which takes twice the time on a CPU; this implementation stacks
all matrices of a shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonal(stack: torch.Tensor, dtype: torch.dtype = torch.float32, rounds: int = 5) -> torch.Tensor:
    """Matrices `[count, rows, columns]` with all singular values near 1, by Newton-Schulz steps computed in `dtype`."""
    a, b, c = NEWTON_SCHULZ
    tall = stack.shape[1] > stack.shape[2]
    x = stack.mT if tall else stack
    x = (x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)).to(dtype)
    for _ in range(rounds):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).float()


class Muon(torch.optim.Optimizer):
    """Nesterov momentum and decoupled weight decay; updates have the usual size of AdamW's (0.2 of the rate)."""

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float, momentum: float, weight_decay: float, dtype: torch.dtype
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self) -> None:
        """Update every matrix that has a gradient."""
        for group in self.param_groups:
            shapes = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    shapes[weight.shape].append(weight)
            for (rows, columns), weights in shapes.items():
                updates = torch.stack([self._direction(weight, group["momentum"]) for weight in weights])
                scale = 0.2 * max(rows, columns) ** 0.5 * group["lr"]
                for weight, update in zip(weights, orthogonal(updates, self.dtype), strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)

    def _direction(self, weight: torch.Tensor, momentum: float) -> torch.Tensor:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weight)
        state["momentum_buffer"].lerp_(weight.grad, 1 - momentum)
        return weight.grad.lerp(state["momentum_buffer"], momentum)

"""Factorize projection weights by singular value decomposition, as a method's `FactorSpec` asks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvq_cli.calibration.codebooks import relative

if TYPE_CHECKING:
    from kvq_cli.attention.capture_points import AttentionLayer

ERROR_MEASURE = (
    "on the weights: || W - U S B^T || / || W || with the factors as stored; energy: sigma_1^2 / sum sigma^2"
)


def factorize(
    layer: AttentionLayer, names: tuple[str, ...], dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Singular value decompositions W = U S B^T of one layer's weights: (tensors in `dtype`, errors by name).

    names: "k", "v" or "x" (both side by side), see `FactorSpec`. Tensors: `<name>.down`, U `[hidden_size, rank]`, and
    `k.up`, `v.up`, S B^T `[rank, kv_heads * head_dim]`. Errors: `rank`, `residual`, and `energy`, the share of the
    first singular direction.
    """
    from kvq_cli.attention.projections import projections  # imports transformers

    weights = {kind: p.weight.detach().float().T for kind, p in zip(("k", "v"), projections(layer), strict=True)}
    tensors: dict[str, Tensor] = {}
    errors: dict[str, Any] = {}
    for name in names:
        kinds = ("k", "v") if name == "x" else (name,)
        weight = torch.cat([weights[kind] for kind in kinds], dim=1)
        # In float64: rounding, which depends on threads and libraries, is then lost in that of `dtype`. Quantized
        # latents would amplify it.
        u, s, b = torch.linalg.svd(weight.double(), full_matrices=False)
        # The sign of a singular vector is arbitrary: make its largest number positive, so that all libraries agree.
        sign = u.gather(0, u.abs().argmax(dim=0, keepdim=True)).sign()
        down = (u * sign).to(dtype)
        up = (sign.T * s[:, None] * b).to(dtype)
        tensors[f"{name}.down"] = down.contiguous()
        widths = [weights[kind].shape[1] for kind in kinds]
        for kind, part in zip(kinds, up.split(widths, dim=1), strict=True):
            tensors[f"{kind}.up"] = part.contiguous()
        residual = relative((weight - down.float() @ up.float()).norm(), weight.norm())
        energy = relative(s[0] ** 2, (s**2).sum())
        errors[name] = {"rank": len(s), "residual": residual.item(), "energy": energy.item()}
    return tensors, errors

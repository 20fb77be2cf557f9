"""The factors of projection weights that a method needs (`FactorSpec`): singular value decompositions, no text."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_cli.attention.capture_points import AttentionLayer
from kvq_cli.attention.projections import projections
from kvq_cli.methods.base import ModelShape

ERROR_MEASURE = (
    "on the weights: || W - U S B^T || / || W || with the factors as stored; energy: sigma_1^2 / sum sigma^2"
)


def factorize(site: AttentionLayer, names: tuple[str, ...], dtype: torch.dtype) -> tuple[dict[str, Tensor], dict]:
    """(tensors, what was measured) of one layer: `<name>.down`, U `[hidden_size, rank]`, and `k.up`, `v.up`, S B^T
    `[rank, kv_heads * head_dim]`, in `dtype`; measured per name: `residual`, `energy` of the first direction."""
    weights = {kind: one.weight.detach().float().T for kind, one in zip(("k", "v"), projections(site), strict=True)}
    tensors, measured = {}, {}
    for name in names:
        kinds = ("k", "v") if name == "x" else (name,)
        whole = torch.cat([weights[kind] for kind in kinds], dim=1)
        u, s, b = torch.linalg.svd(whole, full_matrices=False)
        # The sign of a direction is free: its largest number is positive, so that every library gives the same.
        sign = u.gather(0, u.abs().argmax(dim=0, keepdim=True)).sign()
        down = (u * sign).to(dtype)
        up = (sign.T * s[:, None] * b).to(dtype)
        tensors[f"{name}.down"] = down.contiguous()
        widths = [weights[kind].shape[1] for kind in kinds]
        for kind, part in zip(kinds, up.split(widths, dim=1), strict=True):
            tensors[f"{kind}.up"] = part.contiguous()
        residual = (whole - down.float() @ up.float()).norm() / whole.norm()
        measured[name] = {"rank": len(s), "residual": residual.item(), "energy": (s[0] ** 2 / (s**2).sum()).item()}
    return tensors, measured


def factor_shapes(names: tuple[str, ...], shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Name to shape of the tensors of a layer."""
    size, shapes = shape.kv_heads * shape.head_dim, {}
    for name in names:
        rank = min(shape.hidden_size, 2 * size if name == "x" else size)
        shapes[f"{name}.down"] = (shape.hidden_size, rank)
        shapes |= {f"{kind}.up": (rank, size) for kind in (("k", "v") if name == "x" else (name,))}
    return shapes

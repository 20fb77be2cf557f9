"""Random transforms of all layers together, in the form that calibration writes."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.joined_spec import JoinedSpec


def random_joined(spec: JoinedSpec, kind: str, shape: ModelShape, layer: int, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of a layer's keys ("k") or values ("v"), named as in `Method.plan`: its rows of an orthonormal basis
    that all layers share, and a mean of its own."""
    choice = spec.first_choice(kind, shape)
    layout = spec.tensors(kind, shape, choice)
    width, components = layout["basis"].shape
    numbers, place = spec.numbers(shape), shape.cached_layers.index(layer)
    shared = torch.Generator().manual_seed(1000 * seed + "kv".index(kind))
    basis = torch.linalg.qr(torch.randn(numbers, components, generator=shared, dtype=torch.float64)).Q
    heads = (shape.kv_heads, shape.head_dim)
    mean = torch.randn(len(shape.cached_layers), *heads, generator=shared)
    return {
        f"{kind}.groups": torch.tensor(choice, dtype=torch.int32),
        f"{kind}.mean": mean[place],
        f"{kind}.spread": torch.ones(heads),
        f"{kind}.basis": basis[place * width : (place + 1) * width].float().contiguous(),
    }

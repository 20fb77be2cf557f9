"""Random transforms with codebooks, in the form that calibration writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvq_cli.codecs.chunk_codebooks import CHUNKS
from kvq_cli.codecs.layout import dtype_name
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.specs import Tensors, TransformSpec, transform_layout


def random_tensors(layout: Tensors, generator: torch.Generator) -> dict[str, Tensor]:
    """Normal numbers in the shapes and dtypes of `layout`."""
    return {
        name: torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))
        for name, spec in layout.items()
    }


def random_transform(
    allocation: Sequence[Sequence[int]], width: int, dtype: torch.dtype, generator: torch.Generator
) -> dict[str, Tensor]:
    """The tensors of one stream: a random invertible matrix per group, and random centroids."""
    layout = transform_layout(allocation, width, dtype_name(dtype))
    tensors = random_tensors(layout, generator)
    tensors["allocation"] = torch.tensor(allocation, dtype=torch.int16)
    tensors["std"] = tensors["std"].abs() + 0.5
    for group, row in enumerate(allocation):
        kept = sum(size * chunks for size, chunks in zip(CHUNKS, row, strict=True))
        basis = torch.linalg.qr(torch.randn(width, width, generator=generator).double()).Q
        stretch = torch.linspace(2, 0.5, width).double()
        for name in ("analysis", "synthesis"):
            tensors[name][group] = 0
        tensors["analysis"][group, :kept] = (basis.T * stretch[:, None])[:kept].float()
        tensors["synthesis"][group, :, :kept] = (basis / stretch)[:, :kept].float()
    return tensors


def random_layer(spec: TransformSpec, shape: ModelShape, generator: torch.Generator) -> dict[str, Tensor]:
    """One layer's tensors, named as in `Method.plan`; all components have the same bits."""
    return {name: x for kind in "kv" for name, x in random_stream(spec, kind, shape, generator).items()}


def random_stream(spec: TransformSpec, kind: str, shape: ModelShape, generator: torch.Generator) -> dict[str, Tensor]:
    """The tensors of a layer's keys ("k") or values ("v"), named as in `Method.plan`."""
    allocation, width = spec.first_choice(kind, shape), spec.groups(kind, shape)[1]
    drawn = random_transform(allocation, width, shape.torch_dtype, generator)
    return {f"{kind}.{name}": tensor for name, tensor in drawn.items()}

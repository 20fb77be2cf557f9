"""Random transforms, in the form that calibration writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.specs import Tensors
from kvq_cli.methods.transform_specs import Profile, TransformSpec, transform_layout


def random_tensors(layout: Tensors, generator: torch.Generator) -> dict[str, Tensor]:
    """Normal numbers in the shapes and dtypes of `layout`."""
    return {
        name: torch.randn(spec.shape, generator=generator).to(getattr(torch, spec.dtype))
        for name, spec in layout.items()
    }


def random_transform(
    widths: Sequence[int] | Sequence[Sequence[int]],
    groups: int,
    width: int,
    generator: torch.Generator,
    gain: bool = True,
) -> dict[str, Tensor]:
    """The tensors of one stream: a random orthogonal matrix per group, stretched, and steps that cover 4 deviations.
    widths: of all groups, or of each."""
    rows = [widths] * groups if isinstance(widths[0], int) else widths
    profile = Profile(tuple(map(tuple, rows)), gain)
    tensors = random_tensors(transform_layout(profile, width), generator)
    tensors["widths"] = torch.tensor(profile.rows, dtype=torch.uint8)
    tensors["std"] = tensors["std"].abs() + 0.5
    bits = tensors["widths"].repeat_interleave(8, dim=1).double()
    kept = bits.shape[1]
    stretch = torch.linspace(2, 0.5, width).double()
    step = (bits > 0) * 4 / stretch[:kept] * 2.0**-bits
    coded = torch.where(step > 0, 1 / step, 0)
    for group in range(groups):
        basis = torch.linalg.qr(torch.randn(width, width, generator=generator).double()).Q
        tensors["analysis"][group] = ((basis.T * stretch[:, None])[:kept] * coded[group, :, None]).float()
        tensors["synthesis"][group] = ((basis / stretch)[:, :kept] * step[group]).float()
    tensors["center"][:] = ((2**bits - 1) / 2 + 0.1 * tensors["center"].sign()) * (bits > 0)
    if gain:
        tensors["deviation"][:] = stretch[:kept] * coded
    return tensors


def random_layer(spec: TransformSpec, shape: ModelShape, generator: torch.Generator) -> dict[str, Tensor]:
    """One layer's tensors, named as in `Method.plan`; all components have about the same bits."""
    return {name: x for kind in "kv" for name, x in random_stream(spec, kind, shape, generator).items()}


def random_stream(spec: TransformSpec, kind: str, shape: ModelShape, generator: torch.Generator) -> dict[str, Tensor]:
    """The tensors of a layer's keys ("k") or values ("v"), named as in `Method.plan`."""
    profile = spec.first_choice(kind, shape)
    drawn = random_transform(profile.widths, *spec.groups(kind, shape), generator, profile.gain)
    return {f"{kind}.{name}": tensor for name, tensor in drawn.items()}

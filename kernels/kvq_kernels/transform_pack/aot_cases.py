"""Ahead-of-time cases of encoding and packing: head_dims and profiles of models, both streams, gains."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvq_kernels import fields
from kvq_kernels.aot_cases import Launch
from kvq_kernels.transform_pack.launch import launch, pack_kernel
from kvq_kernels.transform_pack.tables import GainTables, PackTables

ROWS, TOKENS = 8, 64


@dataclass(frozen=True)
class Shape:
    """A model's kv heads and a profile."""

    widths: tuple[int, ...]
    values: bool
    dim: int = 128
    heads: int = 8
    dtype: torch.dtype = torch.float16
    gain: bool = True

    def launch(self, gpu: str) -> Launch:
        """Launch of `pack_kernel`."""

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        heads, dim, kept = self.heads, self.dim, fields.FIELD * len(self.widths)
        limits = empty(255, dtype=torch.float64)
        gain = GainTables(empty(heads, kept), limits, empty(256), 2.0**30, 3.0, 5.0, kept // 2) if self.gain else None

        def by_field(dtype: torch.dtype) -> torch.Tensor:
            return empty(len(self.widths), dtype=dtype)

        tables = PackTables(
            mean=empty(heads, dim),
            to_grid=empty(heads, dim),
            integers=empty(heads, dim, kept),
            step=empty(heads, kept, dtype=torch.float64),
            center=empty(heads, kept),
            largest=by_field(torch.int16),
            word=by_field(torch.int32),
            shift=by_field(torch.int16),
            high=by_field(torch.int32),
            limit=2.0**23,
            values=self.values,
            rate=fields.rate(self.widths),
            gain=gain,
        )
        _, given, fixed, options = launch(empty(ROWS, heads, TOKENS, dim, dtype=self.dtype), tables, gpu)
        return Launch(pack_kernel, given, fixed, options)


SHAPES = {
    "keys-2bit": Shape((4, 4, 3, 3, 3, 2, 2, 2, 2, 2, 2, 1, 1), values=False),
    "values-2bit": Shape((2,) * 16, values=True),
    "values-4bit-no-gain": Shape((4,) * 16, values=True, gain=False),
    "keys-head-dim-64-bf16": Shape((4, 3, 2, 2, 2, 1, 1), values=False, dim=64, heads=3, dtype=torch.bfloat16),
    "values-head-dim-96": Shape((8, 5, 5, 4, 3, 3), values=True, dim=96, heads=32),
    "keys-head-dim-256": Shape((4,) * 4 + (3,) * 4 + (2,) * 8 + (1,) * 4, values=False, dim=256, heads=1),
}


def launches(gpu: str) -> dict[str, Launch]:
    """`pack_kernel` at all shapes."""
    return {name: shape.launch(gpu) for name, shape in SHAPES.items()}

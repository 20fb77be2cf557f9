"""Names, shapes and dtypes of a calibrated layer's tensors, derived from the method's calibration spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch

from kvq_cli.methods.base import CalibrationSpec, CodebookSpec, FactorSpec, ModelShape

#: Name -> (shape, dtype).
Layout: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]


def layer_layout(
    spec: CalibrationSpec | FactorSpec, shape: ModelShape, layer: int, choices: Mapping[str, Sequence[int]]
) -> Layout:
    """The tensors of a layer, named without their prefix `layers.<i>.`.

    choices: for codebooks, by stream ("k", "v"), the index of each kv head's block shape.
    """
    if isinstance(spec, FactorSpec):
        return factor_layout(spec.layers[layer], shape)
    streams = {"k": spec.keys, "v": spec.values}
    return {
        f"{kind}.{name}": size_and_dtype
        for kind, stream in streams.items()
        for name, size_and_dtype in stream_layout(stream, shape, choices[kind]).items()
    }


def stream_layout(spec: CodebookSpec, shape: ModelShape, choice: Sequence[int]) -> Layout:
    """The tensors of one stream. choice: index of each kv head's block shape."""
    channels = (shape.kv_heads, shape.head_dim)
    layout: Layout = {}
    for index in sorted(set(choice)):
        block = spec.shapes[index]
        books = (1 if spec.across_heads else choice.count(index), shape.head_dim // spec.share)
        layout[f"centroids.{block.name}"] = ((*books, spec.entries, block.size), shape.dtype)
    layout["choice"] = ((shape.kv_heads,), torch.int8)
    for name in ("mean", "std") if spec.normalize else ():
        layout[name] = (channels, torch.float32)
    for name in ("lower", "upper") if spec.outliers and not spec.per_token else ():
        layout[name] = (channels, torch.float32)
    return layout


def factor_layout(names: tuple[str, ...], shape: ModelShape) -> Layout:
    """The factors of a layer's projections. names: the factorized weights, see `FactorSpec`."""
    size = shape.kv_heads * shape.head_dim
    layout: Layout = {}
    for name in names:
        rank = min(shape.hidden_size, 2 * size if name == "x" else size)
        layout[f"{name}.down"] = ((shape.hidden_size, rank), shape.dtype)
        layout |= {f"{kind}.up": ((rank, size), shape.dtype) for kind in (("k", "v") if name == "x" else (name,))}
    return layout

"""Names, shapes and dtypes of a calibrated layer's tensors, derived from the method's calibration spec."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from kvq_cli.codecs.chunk_codebooks import CHUNKS
from kvq_cli.codecs.nearest import MAX_ENTRIES
from kvq_cli.lazy import torch
from kvq_cli.methods.base import AnySpec, CodebookSpec, FactorSpec, ModelShape, StreamSpec, TransformSpec, stream_spec

#: Name -> (shape, dtype).
Layout: TypeAlias = "dict[str, tuple[tuple[int, ...], torch.dtype]]"


def layer_layout(spec: AnySpec, shape: ModelShape, layer: int, choices: Mapping[str, Sequence[Any]]) -> Layout:
    """The tensors of a layer, named without their prefix `layers.<i>.`.

    choices: by stream ("k", "v"): for codebooks, the index of each kv head's block shape; for transforms, the
    allocation of each group.
    """
    if isinstance(spec, FactorSpec):
        return factor_layout(spec, layer, shape)
    layout: Layout = {}
    for kind in "kv":
        one = stream_spec(spec, layer, kind)
        if isinstance(one, TransformSpec):
            named = transform_layout(choices[kind], one.groups(kind, shape)[1], shape.dtype)
        else:
            named = {} if one is None else stream_layout(one.stream(kind), shape, choices[kind])
        layout |= {f"{kind}.{name}": form for name, form in named.items()}
    return layout


def transform_layout(allocation: Sequence[Sequence[int]], width: int, dtype: torch.dtype) -> Layout:
    """The tensors of one stream of transform codes; see `TransformCodec`. allocation: for each group of `width`
    channels, how many chunks have 1, 2, 4 and 8 components."""
    groups, kept = len(allocation), max(kept_components(row) for row in allocation)
    layout: Layout = {"allocation": ((groups, len(CHUNKS)), torch.int16)}
    layout |= dict.fromkeys(("mean", "std"), ((groups, width), torch.float32))
    layout |= {"analysis": ((groups, kept, width), torch.float32), "synthesis": ((groups, width, kept), torch.float32)}
    for size, chunks in zip(CHUNKS, zip(*allocation, strict=True), strict=True):
        if sum(chunks):
            layout[f"centroids.{size}"] = ((sum(chunks), MAX_ENTRIES, size), dtype)
    return layout


def kept_components(row: Sequence[int]) -> int:
    """Components of a group's chunks of 1, 2, 4 and 8 components."""
    return sum(size * chunks for size, chunks in zip(CHUNKS, row, strict=True))


def even_allocation(spec: TransformSpec, kind: str, shape: ModelShape) -> list[list[int]]:
    """The allocation that spends the same bits on all components of all groups, for estimates of sizes: all chunks
    have one length, or two where no length fits."""
    groups, width = spec.groups(kind, shape)
    codes = max(1, int(spec.bits * width / 8))
    size = max(size for size in CHUNKS if codes * size <= width)
    longer = (width - codes * size) // size if size < CHUNKS[-1] else 0
    row = {size: codes - longer, 2 * size: longer}
    return [[row.get(each, 0) for each in CHUNKS]] * groups


def code_budget(spec: TransformSpec, shape: ModelShape) -> int:
    """The codes of 8 bits of a token: those of all layers' keys and values together."""
    return _codes(spec.bits, shape.layers * 2 * shape.kv_heads * shape.head_dim)


def least_codes(spec: TransformSpec, shape: ModelShape) -> int:
    """The smallest `code_budget` that gives each group of channels a code; where each stream has the same codes, those
    of the stream with the most groups."""
    groups = [spec.groups(kind, shape)[0] for kind in "kv"]
    return shape.layers * (2 * max(groups) if spec.allocate == "stream" else sum(groups))


def stream_codes(spec: TransformSpec, kind: str, shape: ModelShape) -> int:
    """The codes of 8 bits of a token of one stream that has `bits` of its own; at least one per group."""
    groups, width = spec.groups(kind, shape)
    return max(groups, _codes(spec.bits, groups * width))


def _codes(bits: float, numbers: int) -> int:
    """Whole codes of 8 bits; a product that rounding has put just below a whole number counts as this number."""
    return math.floor(bits * numbers / 8 + 1e-9)


def first_choice(spec: StreamSpec, kind: str, shape: ModelShape) -> list[Any]:
    """The `choices` of `layer_layout` before anything is measured: the first block shape for each head; for
    transforms, the even allocation."""
    return even_allocation(spec, kind, shape) if isinstance(spec, TransformSpec) else [0] * shape.kv_heads


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
    if spec.rotation == "opq":
        layout["rotation"] = ((*channels, shape.head_dim), torch.float32)
        layout["spread"] = (channels, torch.float32)
    for name in ("lower", "upper") if spec.outliers and not spec.per_token else ():
        layout[name] = (channels, torch.float32)
    return layout


def factor_layout(spec: FactorSpec, layer: int, shape: ModelShape) -> Layout:
    """The factors of a layer's projections."""
    size = shape.kv_heads * shape.head_dim
    layout: Layout = {}
    for name in spec.layers[layer]:
        rank = spec.rank(name, shape)
        layout[f"{name}.down"] = ((shape.hidden_size, rank), shape.dtype)
        layout |= {f"{kind}.up": ((rank, size), shape.dtype) for kind in (("k", "v") if name == "x" else (name,))}
    return layout

"""Check the shapes and layouts that the kernels of `transform_attention` assume, without reading a tensor's numbers,
which would wait for the device."""

from __future__ import annotations

from torch import Tensor

from kvq_kernels.decode_attention.checks import check_offset_and_out, check_per_row
from kvq_kernels.decode_attention.parts import Rope
from kvq_kernels.transform_attention.launch import sinks_of
from kvq_kernels.transform_attention.parts import Transform, Transformed


def check_arguments(
    query: Tensor, keys: Transformed, values: Transformed, lengths: Tensor, rope: Rope | None, out: Tensor | None
) -> None:
    """ValueError for arguments that do not fit."""
    for name, side in (("keys", keys), ("values", values)):
        _check_transform(name, side.transform, *query.shape[1:])
        check_per_row(f"{name}.exact.count", side.exact.count, query)
        if side.exact.sinks is None and side.exact.ring is None:
            raise ValueError(f"{name} have neither sinks nor a ring buffer")
    heads = keys.transform.mean.shape[0], values.transform.mean.shape[0]
    if heads[0] != heads[1]:
        raise ValueError(f"keys have {heads[0]} heads, values {heads[1]}")
    check_per_row("lengths", lengths, query)
    check_offset_and_out(rope, out, query)
    windows = [(sinks_of(side.exact), None if side.codes is None else side.codes.shape[2]) for side in (keys, values)]
    if windows[0] != windows[1]:
        raise ValueError(f"keys have (sinks, room) = {windows[0]}, values {windows[1]}")


def _check_transform(name: str, transform: Transform, heads: int, dim: int) -> None:
    """ValueError unless the tensors of a transform fit query heads of `dim` channels."""
    (kv_heads, channels), groups = transform.mean.shape, transform.steps.groups.shape[0]
    if channels != dim or dim % 2 or kv_heads % groups or heads % kv_heads:
        raise ValueError(
            f"{heads} query heads of {dim} channels over {groups} transforms of {kv_heads} heads of {channels} ({name})"
        )
    for tensor in (transform.mean, transform.synthesis, transform.centroids):
        if not tensor.is_contiguous():
            raise ValueError(f"the transform of {name} must be contiguous, not of strides {tensor.stride()}")
    if transform.centroids.ndim != 2 or transform.centroids.shape[1] != 256:
        raise ValueError(f"centroids of {name} must be [components, 256], not {list(transform.centroids.shape)}")

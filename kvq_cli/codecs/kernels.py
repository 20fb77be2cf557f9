"""Calls of the kernels of kvq_kernels by codecs whose tensors are on a GPU; on a CPU the kernels are not loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvq_kernels.quantize_pack import Uniform
    from kvq_kernels.transform_pack import PackTables
    from torch import Tensor


def on_gpu(x: Tensor) -> bool:
    """Whether `x` is on a GPU, of CUDA or ROCm."""
    return x.device.type == "cuda"


def quantize_pack(x: Tensor, **layout: Any) -> Uniform | None:
    """`x` `[B, H, T, D]` packed by the kernel in a `kvq_kernels.quantize_pack.Layout` of these fields, to the same bits
    as by the codec. None: not on a GPU, or a layout that the kernel does not know."""
    if not on_gpu(x):
        return None
    from kvq_kernels.quantize_pack import Layout, quantize_pack, unsupported

    asked = Layout(**layout)
    return None if unsupported(asked) else quantize_pack(x, asked, backend="triton")


def transform_pack(x: Tensor, tables: Callable[[], PackTables]) -> tuple[tuple[Tensor, ...], Tensor | None] | None:
    """Codes and gains of finite `x` `[B, G, T, W]` by the kernel, to the same bits as by the codec; see
    `kvq_kernels.transform_pack`. None: not on a GPU, or more channels than the kernel knows."""
    if not on_gpu(x):
        return None
    from kvq_kernels.transform_pack import transform_pack, unsupported

    return None if unsupported(x.shape[3]) else transform_pack(x, tables(), backend="triton")


def assign_centroids(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor] | None:
    """Codes, int64, and least ||c||^2 / 2 - u.c, float32, both `[codebooks, points]`, of points `[codebooks, points,
    size]` among centroids `[codebooks, entries, size]`. None: not on a GPU, or more than the kernel's 8 numbers of a
    point or 256 entries."""
    if not on_gpu(points):
        return None
    from kvq_kernels.assign_centroids import assign_centroids
    from kvq_kernels.assign_centroids.launch import MAX_ENTRIES, MAX_SIZE

    if centroids.shape[1] > MAX_ENTRIES or centroids.shape[2] > MAX_SIZE:
        return None
    codes, scores = assign_centroids(points, centroids, backend="triton")
    return codes.long(), scores


def sums_by_code(numbers: Tensor, codes: Tensor, entries: int) -> Tensor | None:
    """Sums of rows of float32 numbers `[codebooks, points, columns]` by code, float64 `[codebooks, entries, columns]`,
    in a fixed order. None: not on a GPU, or more than the kernel's 9 columns or 256 entries."""
    if not on_gpu(numbers):
        return None
    from kvq_kernels.assign_centroids import sums_by_code
    from kvq_kernels.assign_centroids.launch import MAX_COLUMNS, MAX_ENTRIES

    if entries > MAX_ENTRIES or numbers.shape[2] > MAX_COLUMNS:
        return None
    return sums_by_code(numbers, codes, entries, backend="triton")


def squat_quantize(x: Tensor, subspace: Tensor, gain: Tensor, **layout: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """Codes, scales and zero-points of `x` `[B, H, T, D]` with errors moved off the subspace, by the kernel; see
    `kvq_kernels.squat_quantize`. None: not on a GPU."""
    if not on_gpu(x):
        return None
    from kvq_kernels.squat_quantize import squat_quantize

    return squat_quantize(x, subspace, gain, **layout, backend="triton")

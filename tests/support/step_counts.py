"""Counts of what a step asks of the host: PyTorch operations, kernel launches, and what waits for the device.

On a CPU, codecs compute with the operations that they run on a GPU, and their kernels with PyTorch: see `as_on_a_gpu`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import kvq_kernels.assign_centroids
import kvq_kernels.quantize_pack
import kvq_kernels.transform_pack
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves
from triton.runtime.interpreter import GridExecutor

from kvq_cli.attention import attention_hooks, torch_prefill
from kvq_cli.cache import layer, rows
from kvq_cli.codecs import codebook, kernels

#: Operations that read a tensor on the host, and indexing, where a mask of the index is counted.
READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "unique_dim"}
INDEXING = {"index", "index_put", "index_put_"}
#: Methods that read a tensor of a CPU without an operation.
READING_METHODS = {"tolist", "numpy", "cpu"}
#: Operations that compute nothing on a device.
FREE = {
    "empty",
    "empty_like",
    "new_empty",
    "empty_strided",
    "new_empty_strided",
    "_unsafe_view",
    "lift_fresh",
    "detach",
}


class StepCounts:
    """operations: by name, without views and allocations, those on small tensors of the host included. launches: of
    Triton kernels. reads: of tensors on the host; uploads: of Python numbers to a tensor. On a GPU both wait."""

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self.launches = self.reads = self.uploads = 0

    @property
    def total(self) -> int:
        """Operations and launches."""
        return self.operations.total() + self.launches

    @property
    def waits(self) -> int:
        """Reads and uploads."""
        return self.reads + self.uploads

    def __str__(self) -> str:
        return f"{self.operations.total()} operations, {self.launches} launches, {self.waits} waits"


class _Dispatched(TorchDispatchMode):
    def __init__(self, counts: StepCounts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        name, counts = function.overloadpacket.__name__, self._counts
        masked = name in INDEXING and any(
            isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1])
        )
        counts.reads += name in READS or masked
        counts.uploads += name == "lift_fresh"
        if name not in READS and not function.is_view and name not in FREE:
            counts.operations[name] += 1
        return function(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    def __init__(self, counts: StepCounts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self._counts.reads += getattr(function, "__name__", "") in READING_METHODS
        return function(*args, **(kwargs or {}))


_running: list[StepCounts] = []


@contextmanager
def counted() -> Iterator[StepCounts]:
    """Count what runs inside the block; see `as_on_a_gpu`."""
    counts = StepCounts()
    _running.append(counts)
    try:
        with torch.no_grad(), _Called(counts), _Dispatched(counts):
            yield counts
    finally:
        _running.pop()


def launched() -> None:
    """Count a launch."""
    for counts in _running:
        counts.launches += 1


def as_on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Inside tests on a CPU: run the operations of a GPU. Kernels of codecs are one launch each, computed by their
    PyTorch references; other interpreted kernels are counted, but not run."""

    def quantize_pack(x: Tensor, **layout: Any) -> Any:
        asked = kvq_kernels.quantize_pack.Layout(**layout)
        if kvq_kernels.quantize_pack.unsupported(asked):
            return None
        launched()
        with _disable_current_modes():
            return kvq_kernels.quantize_pack.quantize_pack(x, asked, backend="torch")

    def transform_pack(x: Tensor, tables: Callable[[], Any]) -> Any:
        launched()
        with _disable_current_modes():
            return kvq_kernels.transform_pack.transform_pack(x, tables(), backend="torch")

    def assign_centroids(points: Tensor, centroids: Tensor) -> Any:
        launched()
        with _disable_current_modes():
            codes, scores = kvq_kernels.assign_centroids.assign_centroids(points, centroids, backend="torch")
        return codes.long(), scores

    patch.setattr(kernels, "on_gpu", lambda _: True)
    patch.setattr(kernels, "quantize_pack", quantize_pack)
    patch.setattr(kernels, "transform_pack", transform_pack)
    patch.setattr(kernels, "assign_centroids", assign_centroids)
    patch.setattr(codebook, "KEEPS_TABLES", ())
    patch.setattr(torch_prefill, "TILED_DEVICES", ())
    for module in (attention_hooks, layer, rows):
        patch.setattr(module, "would_sync", lambda _, columns: columns == 1)
    patch.setattr("kvq_kernels.decode_attention.pages._check_ids", lambda *_: None)
    patch.setattr(GridExecutor, "__call__", lambda *_, **__: launched())

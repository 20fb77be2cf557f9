"""Graphs of decode steps that count their replays: CUDA graphs on a GPU, recorded operations on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from fake_gpu.graph import Graph
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import GridExecutor

from kvq_cli.attention.graphs import CudaGraph


class RecordedGraph:
    """Records operations and interpreted kernels with their tensors (see `fake_gpu.graph`)."""

    made: ClassVar[list[RecordedGraph | CountedCudaGraph]] = []

    def __init__(self) -> None:
        self._graph = Graph()
        self.made.append(self)

    @property
    def replays(self) -> int:
        return self._graph.replays

    def capture(self, work: Callable[[], Tensor]) -> Tensor:
        run = GridExecutor.__call__

        def launched(executor: GridExecutor, *args, **kwargs) -> None:
            def again() -> None:
                with _disable_current_modes():
                    run(executor, *args, **dict(kwargs))

            self._graph.add(again)
            again()

        GridExecutor.__call__ = launched
        try:
            with self._graph.recording():
                return work()
        finally:
            GridExecutor.__call__ = run

    def replay(self) -> None:
        self._graph.replay()


class CountedCudaGraph(CudaGraph):
    """A CUDA graph that counts its replays."""

    def __init__(self, stream: torch.cuda.Stream, pool: object) -> None:
        super().__init__(stream, pool)
        self.replays = 0
        RecordedGraph.made.append(self)

    def replay(self) -> None:
        self.replays += 1
        super().replay()


def counted_graphs(device: torch.device) -> Callable[[], RecordedGraph | CountedCudaGraph]:
    """A factory of the graphs of one cache."""
    if not torch.cuda.is_available():
        return RecordedGraph
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    return lambda: CountedCudaGraph(stream, pool)

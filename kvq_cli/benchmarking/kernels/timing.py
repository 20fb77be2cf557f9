"""Cold-cache timing of GPU kernels, and the copy rate of a GPU's memory.

A measurement replays a CUDA graph of several launches over different memory, after a read of an unrelated buffer has
filled the level-2 cache with clean lines. This excludes Python's overhead, hits on data of earlier launches, and
write-backs of dirty lines.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

#: Bytes that the launches of a graph touch together, within `MAX_COPIES`: several times any level-2 cache.
WORKING_SET = 512 << 20
MAX_COPIES = 8


class Timer:
    """Times calls on one device. rounds: number of measurements. once: a single measurement of a single launch.

    On a CPU there is one measurement by the wall clock, for dry runs only.
    """

    def __init__(self, device: torch.device, rounds: int = 25, once: bool = False) -> None:
        self.device, self.once = device, once or device.type != "cuda"
        self.rounds, self.warm_up = (1, 0) if self.once else (rounds, 3)
        size = 1
        if device.type == "cuda":
            size = max(4 * torch.cuda.get_device_properties(device).L2_cache_size, 64 << 20)
        self._unrelated = torch.zeros(size // 4 or 1, dtype=torch.int32, device=device)
        self._max = torch.empty((), dtype=torch.int32, device=device)

    def copies(self, nbytes: int) -> int:
        """Return how many copies of operands of `nbytes` a measurement needs."""
        return 1 if self.once else max(1, min(MAX_COPIES, WORKING_SET // max(1, nbytes)))

    def spread(self, calls: Sequence[Callable[[], object]]) -> dict[str, float]:
        """Return microseconds per call: percentiles p20, p50 and p80 over the rounds, and the number n of rounds."""
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):  # streams, events and graphs are of the current device
                totals = self._time_graph(calls)
        else:
            totals = self._time_on_cpu(calls)
        times = np.array(totals) / len(calls)
        p20, p50, p80 = (float(f"{x:.4g}") for x in np.percentile(times, [20, 50, 80]))
        return {"p20": p20, "p50": p50, "p80": p80, "n": len(times)}

    def _time_graph(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # compiles kernels and allocates workspaces of libraries
            for call in calls:
                call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            outputs = [call() for call in calls]
        microseconds = []
        for _ in range(self.rounds + self.warm_up):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.amax(self._unrelated, dim=0, out=self._max)  # reads: leaves clean lines in the cache
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            microseconds.append(1000 * start.elapsed_time(end))
        del outputs
        return microseconds[self.warm_up :]

    def _time_on_cpu(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        microseconds = []
        for _ in range(self.rounds):
            start = time.perf_counter()
            for call in calls:
                call()
            microseconds.append(1e6 * (time.perf_counter() - start))
        return microseconds

    def copy_rate(self) -> float:
        """Return the rate of a copy within the device's memory, in bytes read and written per second."""
        size = (1 << 30) if self.device.type == "cuda" else (1 << 20)
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / (self.spread([lambda: target.copy_(source)])["p50"] * 1e-6)

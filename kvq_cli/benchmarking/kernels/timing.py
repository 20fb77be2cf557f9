"""Time of launches on a GPU with cold caches, and how fast it copies.

A measurement times a CUDA graph of several launches, each over memory of its own, after the level-2 cache was filled by
reading another buffer: neither Python's time, nor what an earlier launch left in the cache, nor lines that are still to
be written back count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

#: Launches of one graph touch this many bytes together if there are enough of them.
ENOUGH = 512 << 20
MOST_COPIES = 8


class Timer:
    """For one device. rounds: measurements; on a CPU (where times say nothing) there is one by the wall clock, and with
    `once` on a GPU, too, of one launch."""

    def __init__(self, device: torch.device, rounds: int = 25, once: bool = False) -> None:
        self.device, self.once = device, once or device.type != "cuda"
        self.rounds, self.warm_up = (1, 0) if self.once else (rounds, 3)
        size = 1
        if device.type == "cuda":
            size = max(4 * torch.cuda.get_device_properties(device).L2_cache_size, 64 << 20)
        self._unrelated = torch.zeros(size // 4 or 1, dtype=torch.int32, device=device)
        self._most = torch.empty((), dtype=torch.int32, device=device)

    def copies(self, nbytes: int) -> int:
        """Memories of `nbytes` that a measurement goes over in turn."""
        return 1 if self.once else max(1, min(MOST_COPIES, ENOUGH // max(1, nbytes)))

    def spread(self, calls: Sequence[Callable[[], object]]) -> dict[str, float]:
        """Microseconds per call: p20, p50, p80 over the rounds, and how many these are (n)."""
        times = np.array(self._graphed(calls) if self.device.type == "cuda" else self._plain(calls)) / len(calls)
        p20, p50, p80 = (float(f"{x:.4g}") for x in np.percentile(times, [20, 50, 80]))
        return {"p20": p20, "p50": p50, "p80": p80, "n": len(times)}

    def _graphed(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # compiles, and lets libraries allocate what they keep
            for call in calls:
                call()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = [call() for call in calls]
        found = []
        for _ in range(self.rounds + self.warm_up):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.amax(self._unrelated, dim=0, out=self._most)  # clean lines: nothing is written back later
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            found.append(1000 * start.elapsed_time(end))
        del held
        return found[self.warm_up :]

    def _plain(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        found = []
        for _ in range(self.rounds):
            start = time.perf_counter()
            for call in calls:
                call()
            found.append(1e6 * (time.perf_counter() - start))
        return found

    def copy_rate(self) -> float:
        """Bytes per second, read and written, of a copy within the device's memory."""
        size = (1 << 30) if self.device.type == "cuda" else (1 << 20)
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / (self.spread([lambda: target.copy_(source)])["p50"] * 1e-6)

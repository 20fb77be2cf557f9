"""What compiled code and stored bytes allow at best, on each GPU that kernels are compiled for.

Per cached number a thread issues so many instructions and memory delivers so many bits: attention to n numbers takes
at least n instructions / lanes per second, and n bits / 8 / bytes per second, whichever is longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvq_kernels.static import Report

from kvq_cli.benchmarking.gpus import GPUS

#: Of a data sheet's bandwidth, what a copy reaches: 4.3 of an H200's 4.8 TB/s.
COPY = 0.9
HEADS, DIM = 8, 128  # Llama-3.1-8B's
GRID = ((1, 32768), (1, 131072), (8, 32768), (8, 131072))


@dataclass(frozen=True)
class Issue:
    """gpu: its name in `gpus`. lanes: that issue an instruction per cycle, of all multiprocessors; hertz: boost."""

    gpu: str
    lanes: int
    hertz: float


#: One GPU of each target. NVIDIA: 4 warps of 32 per multiprocessor and cycle; AMD: 4 units of 16 lanes.
OF_TARGET = {
    "sm_80": Issue("a100-80gb", 108 * 128, 1.41e9),
    "sm_89": Issue("l40s", 142 * 128, 2.52e9),
    "sm_90": Issue("h200", 132 * 128, 1.98e9),
    "sm_100": Issue("b200", 148 * 128, 1.965e9),
    "gfx942": Issue("mi300x", 304 * 64, 2.1e9),
}


def floors(report: Report, batch: int, context: int) -> dict[str, float]:
    """Microseconds of one layer's decode attention: by instructions ("issue"), by memory ("bytes"), and how many times
    faster than 16 bits at the copy rate the longer of them is ("limit")."""
    issue = OF_TARGET[report.target]
    rate = COPY * GPUS[issue.gpu].bandwidth
    numbers = 2 * batch * context * HEADS * DIM
    found = {
        "issue": 1e6 * numbers * report.per_number / (issue.lanes * issue.hertz),
        "bytes": 1e6 * numbers * report.bits / 8 / rate,
    }
    longest = max(found.values())
    return found | {"limit": 1e6 * 2 * numbers / rate / longest if longest else 0.0}

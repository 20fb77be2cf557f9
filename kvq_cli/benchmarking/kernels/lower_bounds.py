"""Lower bounds of decode attention's time on each compiled target, from instruction counts and stored bytes.

With i instructions issued and b bits read per cached number, attention to n numbers takes at least n i / (lanes x
clock) seconds to issue, and n b / 8 / bandwidth seconds to read.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvq_kernels.static import Report

from kvq_cli.benchmarking.gpus import GPUS

#: The share of the data sheet's bandwidth that a copy reaches: 4.3 of an H200's 4.8 TB/s.
COPY_EFFICIENCY = 0.9
HEADS, DIM = 8, 128  # Llama-3.1-8B's
#: Pairs (batch, context) of reports.
GRID = ((1, 32768), (1, 131072), (8, 32768), (8, 131072))


@dataclass(frozen=True)
class Issue:
    """Issue rate of a GPU. gpu: its name in `gpus`. lanes: instructions per cycle of all multiprocessors. hertz: boost
    clock."""

    gpu: str
    lanes: int
    hertz: float


#: A GPU of each compilation target. NVIDIA: 4 warps of 32 per multiprocessor and cycle; AMD: 4 units of 16 lanes.
OF_TARGET = {
    "sm_80": Issue("a100-80gb", 108 * 128, 1.41e9),
    "sm_89": Issue("l40s", 142 * 128, 2.52e9),
    "sm_90": Issue("h200", 132 * 128, 1.98e9),
    "sm_100": Issue("b200", 148 * 128, 1.965e9),
    "gfx942": Issue("mi300x", 304 * 64, 2.1e9),
}


def lower_bounds(report: Report, batch: int, context: int) -> dict[str, float]:
    """Return lower bounds of one layer's decode attention in microseconds, by instructions ("issue") and by memory
    traffic ("bytes"), and the speed-up over 16 bits at the copy rate that the larger bound allows ("limit")."""
    issue = OF_TARGET[report.target]
    rate = COPY_EFFICIENCY * GPUS[issue.gpu].bandwidth
    numbers = 2 * batch * context * HEADS * DIM
    bounds = {
        "issue": 1e6 * numbers * report.per_number / (issue.lanes * issue.hertz),
        "bytes": 1e6 * numbers * report.bits / 8 / rate,
    }
    longest = max(bounds.values())
    return bounds | {"limit": 1e6 * 2 * numbers / rate / longest if longest else 0.0}

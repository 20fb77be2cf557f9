"""The experiments that there are, by the operation that they measure."""

from __future__ import annotations

from kvq_cli.benchmarking.kernels.assign import AssignCentroids
from kvq_cli.benchmarking.kernels.decode import DecodeAttention
from kvq_cli.benchmarking.kernels.experiment import Experiment
from kvq_cli.benchmarking.kernels.matvec import QuantizedMatvec
from kvq_cli.benchmarking.kernels.quantize import QuantizePack
from kvq_cli.errors import UsageError

EXPERIMENTS: dict[str, Experiment] = {
    one.operation: one for one in (DecodeAttention(), QuantizedMatvec(), QuantizePack(), AssignCentroids())
}


def chosen(names: list[str] | None) -> list[Experiment]:
    """The experiments of these operations, all without names. UsageError lists those there are."""
    for name in names or []:
        if name not in EXPERIMENTS:
            raise UsageError(f"--operation {name}: nothing is measured of it; measured: {', '.join(EXPERIMENTS)}")
    return [EXPERIMENTS[name] for name in names or EXPERIMENTS]

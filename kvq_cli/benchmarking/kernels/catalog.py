"""All experiments by the operation that they measure."""

from __future__ import annotations

from kvq_cli.benchmarking.kernels.assign import AssignCentroids
from kvq_cli.benchmarking.kernels.decode import DecodeAttention
from kvq_cli.benchmarking.kernels.experiment import Experiment
from kvq_cli.benchmarking.kernels.matvec import QuantizedMatvec
from kvq_cli.benchmarking.kernels.quantize import QuantizePack
from kvq_cli.benchmarking.kernels.squat import SquatQuantize
from kvq_cli.benchmarking.kernels.transform import TransformAttention
from kvq_cli.benchmarking.kernels.transform_pack import TransformPack
from kvq_cli.errors import UsageError

EXPERIMENTS: dict[str, Experiment] = {
    experiment.operation: experiment
    for experiment in (
        DecodeAttention(),
        QuantizedMatvec(),
        QuantizePack(),
        SquatQuantize(),
        AssignCentroids(),
        TransformAttention(),
        TransformPack(),
    )
}


def select_experiments(names: list[str] | None) -> list[Experiment]:
    """Return the experiments of these operations, all of them for None; UsageError for an unknown operation."""
    for name in names or []:
        if name not in EXPERIMENTS:
            raise UsageError(f"--operation {name}: no benchmark for it; valid: {', '.join(EXPERIMENTS)}")
    return [EXPERIMENTS[name] for name in names or EXPERIMENTS]

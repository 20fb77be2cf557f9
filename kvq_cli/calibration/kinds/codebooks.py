"""Cluster captured activations into codebooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvq_cli.calibration.codebooks import ERROR_MEASURE, calibrate_stream
from kvq_cli.calibration.kinds.base import Progress
from kvq_cli.calibration.kinds.capture import CapturePlan
from kvq_cli.calibration.streams import Stream, StreamFunction, cluster_settings
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.distributed import Workers
from kvq_cli.methods.specs import CalibrationSpec


@dataclass(frozen=True)
class CodebookPlan(CapturePlan):
    """Codebooks of each stream, of the candidate block shape with the lowest error."""

    measure = ERROR_MEASURE

    spec: CalibrationSpec

    def functions(
        self, work: WorkFolder, captures: WorkFolder, progress: Progress, workers: Workers | None
    ) -> Callable[[Stream], StreamFunction]:
        def cluster(stream: Stream) -> StreamFunction:
            settings = cluster_settings(self, stream, self.spec.fisher, self.spec.hybrid)
            return partial(calibrate_stream, spec=self.spec.stream(stream[1]), settings=settings)

        return cluster

    def _label(self, layer: int, name: str) -> str:
        """Name the block shape `<shape>` if there are several candidates, whose codebooks have one size."""
        shapes = self.spec.stream(name[0]).shapes
        return super()._label(layer, name.replace(f".{shapes[0].name}", ".<shape>") if len(shapes) > 1 else name)

"""Fit transforms to captured activations, give out codes over their components, and cluster these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvq_cli.calibration.kinds.base import Progress
from kvq_cli.calibration.kinds.capture import CapturePlan
from kvq_cli.calibration.streams import (
    Stream,
    StreamFunction,
    apply_to_streams,
    cluster_settings,
    stored_transform,
    streams_of,
    transform_step,
    write_transform,
)
from kvq_cli.calibration.transforms import (
    ERROR_MEASURE,
    Transform,
    allocate_codes,
    calibrate_transform,
    fit_transform,
)
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.distributed import Workers
from kvq_cli.methods.specs import TransformSpec


@dataclass(frozen=True)
class TransformPlan(CapturePlan):
    """Transforms and codebooks of each stream; codes are allocated over all streams."""

    measure = ERROR_MEASURE

    spec: TransformSpec

    def step_bytes(self) -> int:
        shape = self.loaded.shape
        sizes = (self.spec.groups(kind, shape) for kind in "kv")
        # Float64: analysis and synthesis, and mean, std and variances.
        return shape.layers * sum(8 * groups * width * (2 * width + 3) for groups, width in sizes)

    def functions(
        self, work: WorkFolder, captures: WorkFolder, progress: Progress, workers: Workers | None
    ) -> Callable[[Stream], StreamFunction]:
        spec, shape, streams = self.spec, self.loaded.shape, streams_of(self)

        def groups(stream: Stream) -> int:
            return spec.groups(stream[1], shape)[0]

        def transform(stream: Stream) -> Transform:
            return stored_transform(self, work, captures, stream, groups(stream), spec.metric)

        def fit(stream: Stream) -> StreamFunction:
            return partial(fit_transform, groups=groups(stream), metric=spec.metric)

        def write(stream: Stream, fitted: Transform) -> None:
            write_transform(work, transform_step(stream, groups(stream), spec.metric), fitted)

        missing = [each for each in streams if not work.has_tensors(transform_step(each, groups(each), spec.metric))]
        done = len(streams) - len(missing)
        progress("transform", done, len(streams))
        for _ in apply_to_streams(self, captures, fit, missing, write, workers):
            done += 1
            progress("transform", done, len(streams))
        lengths = allocate_codes({stream: transform(stream).variances.cpu() for stream in streams}, spec, shape)

        def cluster(stream: Stream) -> StreamFunction:
            settings = cluster_settings(self, stream, spec.fisher)
            fitted = transform(stream)
            return partial(calibrate_transform, transform=fitted, lengths=lengths[stream], settings=settings)

        return cluster

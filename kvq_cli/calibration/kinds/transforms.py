"""Fit transforms to captured activations, choose the widths of their components over the model, and fit their steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvq_kernels.fields import FIELD

from kvq_cli.calibration.allocation import model_profiles
from kvq_cli.calibration.kinds.base import Progress
from kvq_cli.calibration.kinds.capture import CapturePlan
from kvq_cli.calibration.streams import (
    Stream,
    StreamFunction,
    apply_to_streams,
    stored_transform,
    streams_of,
    transform_settings,
    transform_step,
    write_transform,
)
from kvq_cli.calibration.transforms import ERROR_MEASURE, Transform, calibrate_transform, fit_transform
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.distributed import Workers
from kvq_cli.methods.transform_specs import TransformSpec


@dataclass(frozen=True)
class TransformPlan(CapturePlan):
    """Transforms and steps of each stream; bits are allocated over all streams."""

    measure = ERROR_MEASURE

    spec: TransformSpec

    def step_bytes(self) -> int:
        shape = self.loaded.shape
        sizes = (self.spec.groups(kind, shape) for kind in "kv")
        # Float64: analysis and synthesis, mean, std and variances, and 9 losses of each field.
        numbers = (groups * (width * (2 * width + 3) + 9 * (width // FIELD)) for groups, width in sizes)
        return 8 * len(shape.cached_layers) * sum(numbers)

    def functions(
        self, work: WorkFolder, captures: WorkFolder, progress: Progress, workers: Workers | None
    ) -> Callable[[Stream], StreamFunction]:
        shape, streams = self.loaded.shape, streams_of(self)
        settings = {kind: transform_settings(self, self.spec, kind) for kind in "kv"}

        def transform(stream: Stream) -> Transform:
            return stored_transform(self, work, captures, stream, settings[stream[1]])

        def fit(stream: Stream) -> StreamFunction:
            return partial(fit_transform, settings=settings[stream[1]])

        def write(stream: Stream, fitted: Transform) -> None:
            write_transform(work, transform_step(stream, settings[stream[1]]), fitted)

        missing = [each for each in streams if not work.has_tensors(transform_step(each, settings[each[1]]))]
        done = len(streams) - len(missing)
        progress("transform", done, len(streams))
        for _ in apply_to_streams(self, captures, fit, missing, write, workers):
            done += 1
            progress("transform", done, len(streams))
        losses = {stream: transform(stream).losses.cpu().numpy() for stream in streams}
        profiles = model_profiles(losses, self.spec, shape)

        def calibrate(stream: Stream) -> StreamFunction:
            fitted, kind = transform(stream), stream[1]
            return partial(
                calibrate_transform, transform=fitted, profile=profiles[stream], kind=kind, settings=settings[kind]
            )

        return calibrate

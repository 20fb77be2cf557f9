"""Calibrate each stream by the method that serves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Self

from kvq_cli.calibration.kinds.base import Progress
from kvq_cli.calibration.kinds.capture import CapturePlan
from kvq_cli.calibration.mixed import ERROR_MEASURE, calibrate_component
from kvq_cli.calibration.settings import CalibrationOptions
from kvq_cli.calibration.streams import Stream, StreamFunction, cluster_settings, streams_of
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.distributed import Workers
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import Method
from kvq_cli.methods.mixed import Mixed
from kvq_cli.methods.transform_specs import MixedSpec
from kvq_cli.models import LoadedModel


@dataclass(frozen=True)
class MixedPlan(CapturePlan):
    """Each stream as its method asks; transforms allocate their codes inside the stream."""

    measure = ERROR_MEASURE

    method: Mixed
    spec: MixedSpec

    @classmethod
    def make(cls, loaded: LoadedModel, method: Method, options: CalibrationOptions) -> Self:
        plan = super().make(loaded, method, options)
        plan._check_blocks()
        return plan

    def functions(
        self, work: WorkFolder, captures: WorkFolder, progress: Progress, workers: Workers | None
    ) -> Callable[[Stream], StreamFunction]:
        def calibrate(stream: Stream) -> StreamFunction:
            layer, kind = stream
            return partial(
                calibrate_component,
                method=self.method.component(*stream, self.loaded.shape),
                layer=layer,
                kind=kind,
                shape=self.loaded.shape,
                settings=cluster_settings(self, stream),
            )

        return calibrate

    def _label(self, layer: int, name: str) -> str:
        return f"layers.{layer}.{name}"

    def _check_blocks(self) -> None:
        """Raise UsageError where a sample's captured tokens are no block of a part that does not calibrate: its errors
        are measured on whole blocks."""
        for layer, kind in streams_of(self):
            method = self.method.component(layer, kind, self.loaded.shape)
            if method.calibrates:
                continue
            block = method.stream_plan(kind, layer, self.loaded.shape, {}).codec.block_tokens
            if self.capture.tokens < block:
                name = {"k": "keys", "v": "values"}[kind]
                raise UsageError(
                    f"{name} of layer {layer} are packed in blocks of {block} tokens, and {self.capture.tokens} tokens "
                    "are captured of each sample: raise --seqlen or --disk, or lower --samples"
                )

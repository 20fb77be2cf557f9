"""`CapturePlan`: calibrate each stream (keys or values of a layer) from captured keys, values and gradients."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from kvq_cli.calibration import estimate
from kvq_cli.calibration.captures import capture_all, captured_tokens, captures_folder
from kvq_cli.calibration.finished import Note, named_inputs
from kvq_cli.calibration.kinds.base import CalibrationPlan, Progress
from kvq_cli.calibration.kmeans import VERSION as CLUSTERING
from kvq_cli.calibration.kmeans import choose_engine
from kvq_cli.calibration.settings import (
    CalibrationOptions,
    CalibrationSettings,
    CaptureSize,
    capture_size,
    check_enough,
)
from kvq_cli.calibration.streams import Stream, StreamFunction, cluster_all, stream_name, streams_of
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.distributed import Workers
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import Method
from kvq_cli.methods.specs import CaptureSpec
from kvq_cli.models import LoadedModel


@dataclass(frozen=True)
class CapturePlan(CalibrationPlan):
    """Capture activations on text, and calibrate each stream from them."""

    #: How the errors are measured, for the artifact.
    measure: ClassVar[str]

    spec: CaptureSpec
    settings: CalibrationSettings
    capture: CaptureSize

    @classmethod
    def make(cls, loaded: LoadedModel, method: Method, options: CalibrationOptions) -> Self:
        spec: Any = method.calibration(loaded.shape)
        spec.check(loaded.shape)
        settings = options.resolve(loaded, *spec.entries)
        size = capture_size(settings, spec.skip, spec.unit, loaded)
        for least, what in spec.needed_tokens(loaded.shape):
            check_enough(settings, size, least, what)
        shortest = spec.skip + spec.near + 2  # the last token predicts nothing
        if spec.near and spec.weighted and settings.seqlen < shortest:
            raise UsageError(
                f"--seqlen {settings.seqlen}: predictions read the newest {spec.near} and the first {spec.skip} tokens "
                f"in full precision, so that none reads a packed token: raise it to {shortest} or more"
            )
        return cls(loaded, method, spec, settings, size)

    @abstractmethod
    def functions(
        self, work: WorkFolder, captures: WorkFolder, progress: Progress, workers: Workers | None
    ) -> Callable[[Stream], StreamFunction]:
        """Return the functions that calibrate a stream, after steps that need all streams."""

    def run(
        self, work: WorkFolder, captured: Path | None, progress: Progress, note: Note, workers: Workers | None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        with captures_folder(self, work, captured, note) as captures:
            capture_all(self, captures, progress, workers, weighted=self.spec.weighted)
            functions = self.functions(work, captures, progress, workers)
            errors = cluster_all(self, work, captures, functions, progress, workers)
        tensors = {
            f"layers.{stream_name(*stream)}.{key}": tensor
            for stream in streams_of(self)
            for key, tensor in work.read_tensors(stream_name(*stream)).items()
        }
        return tensors, {"captured": captured_tokens(self), "errors": {"measure": self.measure, "layers": errors}}

    def step_bytes(self) -> int:
        return 0  # codebooks are small beside the activations that they are clustered from

    def disk_bytes(self) -> int:
        return self.step_bytes() + self.capture.nbytes

    def sizes(self, resident: int) -> dict[str, Any]:
        capturing = estimate.capture_bytes(self)
        clustering = estimate.cluster_workers(self) * estimate.stream_bytes(self)
        return {
            "captured_bytes": self.capture.nbytes,
            "captured_share": self.capture.units / self.capture.possible,
            "memory_bytes": resident + max(capturing, clustering),  # one after the other
            "checkpointed_layers": estimate.checkpointed_layers(self.loaded, self.settings.seqlen),
        }

    @cached_property
    def inputs(self) -> dict[str, Any]:
        return {**super().inputs, "clustering": CLUSTERING}

    def settings_dict(self) -> dict[str, Any]:
        return self.settings.to_dict()

    def versions(self) -> dict[str, str]:
        versions = super().versions()
        if any(choose_engine(self.settings.kmeans, size) == "faiss" for size in self.spec.entries):
            import faiss

            versions["faiss"] = faiss.__version__
        return versions

    def capture_request(self) -> dict[str, Any]:
        """Everything the captured activations depend on: plans with equal requests can share them."""
        size, settings = self.capture, self.settings_dict()
        tokens: dict[str, Any] = {"skip": size.skip, "tokens": size.tokens, "near": self.spec.near}
        if size.units < size.possible:  # drawn at random in units
            tokens["unit"] = size.unit
        text = {key: settings[key] for key in ("dataset", "samples", "seqlen", "gradients", "seed")} | self.text_tokens
        # Clustering, and so faiss, captures nothing.
        captured = {key: value for key, value in self.inputs.items() if key != "clustering"}
        inputs = named_inputs(captured, super().versions())
        return {key: self.request()[key] for key in ("kvq", "model")} | inputs | text | tokens

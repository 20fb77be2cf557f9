"""Rotations of keys and values by what attention reads them with on a text (OSCAR)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from kvq_cli.attention.capture_points import AttentionLayer
from kvq_cli.calibration import spectral
from kvq_cli.calibration.kinds.base import Calibrated, Progress
from kvq_cli.calibration.kinds.factors import FactorPlan
from kvq_cli.calibration.settings import CalibrationOptions, CalibrationSettings
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.codecs.nearest import MAX_ENTRIES
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import Method
from kvq_cli.methods.specs import Spec
from kvq_cli.models import LoadedModel


@dataclass(frozen=True)
class RotationPlan(FactorPlan):
    """Rotations of each layer, from sums over a text that is read twice: of queries, then of weighted values."""

    measure = spectral.ERROR_MEASURE

    spec: Spec  # type: ignore[assignment]  # no weights are factorized
    settings: CalibrationSettings

    @classmethod
    def make(cls, loaded: LoadedModel, method: Method, options: CalibrationOptions) -> Self:
        spec: Any = method.calibration(loaded.shape)
        settings = options.resolve(loaded, MAX_ENTRIES)
        if (tokens := settings.samples * settings.seqlen) < (width := loaded.shape.head_dim):
            raise UsageError(f"{tokens} tokens are too few for {width} channels: raise --seqlen or --samples")
        return cls(loaded, method, spec, settings)

    def settings_dict(self) -> dict[str, Any]:
        return {name: getattr(self.settings, name) for name in ("dataset", "samples", "seqlen", "seed")}

    def sums_bytes(self) -> int:
        """Count the bytes of `spectral.Sums` of all layers."""
        shape = self.loaded.shape
        return 2 * 8 * len(shape.cached_layers) * shape.kv_heads * shape.head_dim**2

    def read_text(self, work: WorkFolder, layers: Sequence[AttentionLayer], progress: Progress) -> None:
        """Write the sums over the text, by layer."""
        windows = self.read_windows(work, progress)
        self._read("queries", spectral.queries_of, work, layers, windows, progress)
        queries = {layer.index: work.read_tensors(f"{layer.index}.queries") for layer in layers}
        self._read("values", spectral.values_of(queries), work, layers, windows, progress)

    def _read(
        self,
        what: str,
        summed: Any,
        work: WorkFolder,
        layers: Sequence[AttentionLayer],
        windows: Tensor,
        progress: Progress,
    ) -> None:
        if not work.has_tensors(f"{layers[-1].index}.{what}"):  # the last that is written
            sums = spectral.TextSums(self.loaded.model, summed)
            for done, window in enumerate(windows):
                progress(f"read {what}", done, len(windows))
                sums.add(window)
            for layer, found in sums.by_layer.items():
                work.write_tensors(f"{layer}.{what}", found)
        progress(f"read {what}", len(windows), len(windows))

    def factorize(self, work: WorkFolder, layer: AttentionLayer) -> Calibrated:
        """Return the rotations of a layer, and their errors."""
        return spectral.layer_rotations(*(work.read_tensors(f"{layer.index}.{what}") for what in ("queries", "values")))

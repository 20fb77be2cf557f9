"""Factorize projection weights, for the activations of a text or as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from torch import Tensor

from kvq_cli.attention.capture_points import AttentionLayer, attention_layers
from kvq_cli.calibration import capture, factors, low_rank
from kvq_cli.calibration.finished import Note
from kvq_cli.calibration.kinds.base import Calibrated, CalibrationPlan, Progress
from kvq_cli.calibration.settings import CalibrationOptions, CalibrationSettings
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.codecs.nearest import MAX_ENTRIES
from kvq_cli.distributed import Workers
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import Method
from kvq_cli.methods.specs import FactorSpec, LowRankSpec
from kvq_cli.models import LoadedModel

#: Windows of text that PALU's sums are written after: a resumed run reads fewer again. The sums of Llama-3.1-8B take
#: 270 MB.
_SAVED_EVERY = 4
_SUMS = "sums"


@dataclass(frozen=True)
class FactorPlan(CalibrationPlan):
    """Singular value decompositions of weights; no text is read."""

    #: How the errors are measured, for the artifact.
    measure: ClassVar[str] = factors.ERROR_MEASURE

    spec: FactorSpec

    @classmethod
    def make(cls, loaded: LoadedModel, method: Method, options: CalibrationOptions) -> Self:
        spec: Any = method.calibration(loaded.shape)
        return cls(loaded, method, spec)

    def step_bytes(self) -> int:
        return sum(tensor["bytes"] for tensor in self.planned_tensors()) + 2 * self.sums_bytes()  # sums, their means

    def sizes(self, resident: int) -> dict[str, Any]:
        shape = self.loaded.shape
        # An SVD holds the weights, its three results and as much again as workspace, in 32 bits.
        scratch = 5 * 4 * shape.hidden_size * 2 * shape.kv_heads * shape.head_dim
        # Before it, the text is read: sums, and their means or the bytes that are written of them.
        return {"memory_bytes": resident + max(2 * self.sums_bytes(), scratch)}

    def sums_bytes(self) -> int:
        """Bytes of sums over the text."""
        return 0

    def run(
        self, work: WorkFolder, captured: Path | None, progress: Progress, note: Note, workers: Workers | None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        layers = attention_layers(self.loaded.model)
        progress("factorize", 0, len(layers))
        self.read_text(work, layers, progress)
        tensors: dict[str, Tensor] = {}
        measured = []
        for done, layer in enumerate(layers, 1):
            step = f"{layer.index}.factors"
            errors = work.read_json(step)
            if errors is None:
                factorized, errors = self.factorize(work, layer)
                work.write_tensors(step, {key: tensor.cpu() for key, tensor in factorized.items()})
                work.write_json(step, errors)  # last: marks the step as finished
            tensors |= {f"layers.{layer.index}.{key}": tensor for key, tensor in work.read_tensors(step).items()}
            measured.append(errors)
            progress("factorize", done, len(layers))
        return tensors, {"errors": {"measure": self.measure, "layers": measured}}

    def read_text(self, work: WorkFolder, layers: Sequence[AttentionLayer], progress: Progress) -> None:
        """Write what the factors need of a text."""

    def factorize(self, work: WorkFolder, layer: AttentionLayer) -> Calibrated:
        """The factors of a layer's weights, and their errors."""
        return factors.factorize(layer, self.spec.layers[layer.index], self.loaded.shape.torch_dtype)


@dataclass(frozen=True)
class LowRankPlan(FactorPlan):
    """Low-rank factors of weights for the keys and values that they give on text; settings None: of the weights."""

    measure = low_rank.ERROR_MEASURE

    spec: LowRankSpec
    settings: CalibrationSettings | None = None

    @classmethod
    def make(cls, loaded: LoadedModel, method: Method, options: CalibrationOptions) -> Self:
        plan = super().make(loaded, method, options)
        if not plan.spec.whiten:
            return plan
        text = options.resolve(loaded, MAX_ENTRIES)
        width = loaded.shape.head_dim * plan.spec.heads
        if (tokens := text.samples * text.seqlen) < width:
            raise UsageError(f"{tokens} tokens are too few for {width} channels: raise --seqlen or --samples")
        return cls(loaded, method, plan.spec, text)

    def settings_dict(self) -> dict[str, Any]:
        names = ("dataset", "samples", "seqlen", "seed") if self.settings else ()
        return {name: getattr(self.settings, name) for name in names}

    def sums_bytes(self) -> int:
        """Bytes of `low_rank.SecondMoments` of all layers."""
        shape, heads = self.loaded.shape, self.spec.heads
        numbers = len(shape.cached_layers) * 2 * (shape.kv_heads // heads) * (heads * shape.head_dim) ** 2
        return 8 * numbers if self.spec.whiten else 0

    def read_text(self, work: WorkFolder, layers: Sequence[AttentionLayer], progress: Progress) -> None:
        """Write the second moments of what W_k and W_v give on the text, by layer."""
        if not self.spec.whiten:
            return
        windows = self.read_windows(work, progress)
        if not work.has_tensors(f"{layers[-1].index}.moments"):  # the last that is written
            with low_rank.SecondMoments(layers, self.spec, self.loaded.shape) as moments:
                if work.has_tensors(_SUMS):
                    moments.resume(work.read_tensors(_SUMS))
                first = moments.tokens // windows.shape[1]
                progress("read activations", first, len(windows))
                for done, window in enumerate(windows[first:], first + 1):
                    capture.forward(self.loaded.model, window)
                    if done % _SAVED_EVERY == 0:
                        work.write_tensors(_SUMS, moments.sums())
                    progress("read activations", done, len(windows))
            for layer, found in moments.by_layer().items():
                work.write_tensors(f"{layer}.moments", {kind: moment.cpu() for kind, moment in found.items()})
        progress("read activations", len(windows), len(windows))

    def factorize(self, work: WorkFolder, layer: AttentionLayer) -> Calibrated:
        moments = work.read_tensors(f"{layer.index}.moments") if self.spec.whiten else None
        return low_rank.factorize_groups(layer, self.spec, self.loaded.shape, moments)

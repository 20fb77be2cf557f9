"""`CalibrationPlan`, the base of all kinds of calibration: what is requested, what it takes, how it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

import kvq_cli
from kvq_cli.artifact import fingerprint
from kvq_cli.artifact.fingerprint import weights_digest
from kvq_cli.calibration.finished import Note, named_inputs
from kvq_cli.calibration.settings import CalibrationOptions
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.data.texts import SELF, file_digest, load_text, sampled_windows, token_windows
from kvq_cli.distributed import Workers
from kvq_cli.methods.base import Method
from kvq_cli.methods.registry import to_config
from kvq_cli.methods.specs import Spec
from kvq_cli.model_source import library_versions
from kvq_cli.models import LoadedModel, check_token_ids

#: Called as progress(phase, done, total) when a phase begins and after each of its steps.
Progress = Callable[[str, int, int], None]
#: Tensors of a stream, layer or model, and their errors as plain JSON values.
Calibrated: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]


@dataclass(frozen=True)
class CalibrationPlan(ABC):
    """A calibration of one kind, checked before the model runs: model, method, and what the method asks for."""

    loaded: LoadedModel
    method: Method
    spec: Spec

    @classmethod
    @abstractmethod
    def make(cls, loaded: LoadedModel, method: Method, options: CalibrationOptions) -> CalibrationPlan:
        """Check the request and fill in defaults; see `plan.plan_calibration`."""

    @abstractmethod
    def step_bytes(self) -> int:
        """Bytes on disk of finished steps while it runs, without captured activations."""

    def disk_bytes(self) -> int:
        """Bytes on disk while it runs."""
        return self.step_bytes()

    @abstractmethod
    def sizes(self, resident: int) -> dict[str, Any]:
        """The entries of `kvq calibrate --dry-run` on memory and captured data. resident: bytes of memory in use."""

    @abstractmethod
    def run(
        self, work: WorkFolder, captured: Path | None, progress: Progress, note: Note, workers: Workers | None
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Compute the artifact's tensors, and the entries of its config that are measured. See `pipeline.calibrate`."""

    def planned_tensors(self) -> list[dict[str, Any]]:
        """Name, shape, dtype and bytes (all layers together) of each kind of tensor in the artifact; for transforms, as
        if all their components had the same bits."""
        shape = self.loaded.shape
        counts = Counter(
            (self._label(layer, name), form)
            for layer in shape.cached_layers
            for name, form in self.spec.layout(shape, layer, self.spec.first_choices(shape, layer)).items()
        )
        return [
            {
                "name": name,
                "shape": list(form.shape),
                "dtype": form.dtype,
                "bytes": layers * form.nbytes,
            }
            for (name, form), layers in counts.items()
        ]

    def _label(self, layer: int, name: str) -> str:
        """The name of a layer's tensor in `planned_tensors`: equal for tensors that are listed together."""
        return f"layers.*.{name}"

    def settings_dict(self) -> dict[str, Any]:
        """The settings as plain JSON values; empty where no text is read."""
        return {}

    def request(self) -> dict[str, Any]:
        """Everything the tensors depend on: equal requests, equal artifacts. Saved in `config.json`."""
        loaded = self.loaded
        trusted = {"trust_remote_code": True} if loaded.trust_remote_code else {}
        return {
            "kvq": kvq_cli.__version__,
            "method": to_config(self.method),
            "model": {
                "name": loaded.name,
                "revision": loaded.revision,
                "dtype": loaded.shape.dtype,
                "fingerprint": fingerprint(loaded.model).to_dict(),
                **trusted,
            },
            "calibration": self.settings_dict(),
        }

    @cached_property
    def inputs(self) -> dict[str, Any]:
        """What the tensors depend on beside `request` and the libraries. Saved in `config.json`. Reads all weights,
        once."""
        dataset = self.settings_dict().get("dataset")
        return {
            "weights": weights_digest(self.loaded.model),
            "text": None if dataset is None else file_digest(dataset),
            "results": kvq_cli.RESULTS,
            "device": self.loaded.model.device.type,
        }

    def versions(self) -> dict[str, str]:
        """Versions of the libraries that compute the tensors. Saved in `config.json`."""
        return library_versions()

    @property
    def named_inputs(self) -> dict[str, Any]:
        """`inputs` and `versions`, by the names that messages use."""
        return named_inputs(self.inputs, self.versions())

    @cached_property
    def windows(self) -> Tensor | None:
        """The samples of the text, int64 `[samples, seqlen]`; None where none is read, or the model samples it."""
        settings = self.settings_dict()
        if settings.get("dataset", SELF) == SELF:
            return None
        text = load_text(settings["dataset"], "calibration")
        sizes = (settings[key] for key in ("seqlen", "samples", "seed"))
        return token_windows(self.loaded.tokenizer, text, *sizes)

    @property
    def text_tokens(self) -> dict[str, Any]:
        """What unfinished steps depend on beside `request` and `named_inputs`, by the name that messages use; empty
        where no text is read."""
        if not self.settings_dict():
            return {}
        if self.windows is None:  # `data.texts.sampled_windows` reads no more of the tokenizer
            digest: Any = [self.loaded.tokenizer.bos_token_id, len(self.loaded.tokenizer)]
        else:
            digest = sha256(self.windows.numpy().tobytes()).hexdigest()
        return {"tokenization of --dataset": digest}

    def read_windows(self, folder: WorkFolder, progress: Progress) -> Tensor:
        """The samples of the text, sampled by the model if so asked, int64 `[samples, seqlen]`; kept in `folder`, since
        sampling takes long."""
        progress("read text", 0, 1)
        if not folder.has_tensors("windows"):
            windows, loaded = self.windows, self.loaded
            if windows is None:
                sizes = (self.settings_dict()[key] for key in ("seqlen", "samples", "seed"))
                windows = sampled_windows(loaded.model, loaded.tokenizer, *sizes)
            check_token_ids(loaded.model, windows.tolist())
            folder.write_tensors("windows", {"windows": windows})
        progress("read text", 1, 1)
        return folder.read_tensors("windows")["windows"]

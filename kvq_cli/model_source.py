"""Load in a worker the model that the process has which sends the work."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import transformers

from kvq_cli import RESULTS, __version__
from kvq_cli.artifact.fingerprint import weights_digest
from kvq_cli.errors import KvqError
from kvq_cli.models import LoadedModel, load_model


def library_versions() -> dict[str, str]:
    """Versions of the libraries that numbers depend on."""
    return {"torch": torch.__version__, "transformers": transformers.__version__}


def _software() -> str:
    versions = {"kvq": f"{__version__} (results {RESULTS})", **library_versions()}
    return ", ".join(f"{name} {version}" for name, version in versions.items())


@dataclass(frozen=True)
class ModelSource:
    """The arguments of `load_model`, what the model must be there, and the folder to which paths are relative."""

    name: str
    device: str
    dtype: str
    trust_remote_code: bool
    revision: str | None
    weights: str
    software: str = field(default_factory=_software)
    folder: str = field(default_factory=os.getcwd)

    @classmethod
    def of(cls, loaded: LoadedModel) -> ModelSource:
        device, dtype = loaded.model.device.type, str(loaded.model.dtype).removeprefix("torch.")
        weights = weights_digest(loaded.model)
        return cls(loaded.name, device, dtype, loaded.trust_remote_code, loaded.revision, weights)

    def load(self) -> LoadedModel:
        """Runs in a worker: enters the folder and loads the model. KvqError if it is another model there."""
        with suppress(OSError):  # a machine without this folder finds files by absolute paths
            os.chdir(self.folder)
        options = {"trust_remote_code": self.trust_remote_code, "accept_license": True}  # it is loaded at the sender
        loaded = load_model(self.name, self.device, self.dtype, **options)
        found = ModelSource.of(loaded)
        compared = {
            "device": (found.device, self.device),
            "dtype": (found.dtype, self.dtype),
            "revision": (found.revision, self.revision),
            "weights": (found.weights, self.weights),
            "software": (found.software, self.software),
        }
        for what, (here, sent) in compared.items():
            if here != sent:
                raise KvqError(
                    f"--model {self.name}: a worker has another {what}: {here} instead of {sent}: "
                    "use the same model and versions on all machines"
                )
        return loaded

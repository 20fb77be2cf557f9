"""Plans of a calibration: method, model and settings, checked before the model runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import kvq_cli
from kvq_cli.artifact import fingerprint
from kvq_cli.calibration.settings import CalibrationOptions, CalibrationSettings, CaptureSize, capture_size
from kvq_cli.methods.base import CalibrationSpec, FactorSpec, Method
from kvq_cli.methods.registry import to_config
from kvq_cli.models import LoadedModel


@dataclass(frozen=True)
class CalibrationPlan:
    """The model and the method; see `CodebookPlan` and `FactorPlan`."""

    loaded: LoadedModel
    method: Method

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
                "dtype": str(loaded.shape.dtype).removeprefix("torch."),
                "fingerprint": fingerprint(loaded.model).to_dict(),
                **trusted,
            },
            "calibration": self.settings_dict(),
        }


@dataclass(frozen=True)
class CodebookPlan(CalibrationPlan):
    """Capture activations on text, then cluster them into codebooks."""

    spec: CalibrationSpec
    settings: CalibrationSettings
    capture: CaptureSize

    def settings_dict(self) -> dict[str, Any]:
        return self.settings.to_dict()

    def capture_request(self) -> dict[str, Any]:
        """Everything the captured activations depend on: plans with equal requests can share them."""
        size, settings = self.capture, self.settings_dict()
        tokens: dict[str, Any] = {"skip": size.skip, "tokens": size.tokens}
        if size.units < size.possible:  # drawn at random in units
            tokens["unit"] = size.unit
        text = {key: settings[key] for key in ("dataset", "samples", "seqlen", "gradients", "seed")}
        return {key: self.request()[key] for key in ("kvq", "model")} | text | tokens


@dataclass(frozen=True)
class FactorPlan(CalibrationPlan):
    """Factorize projection weights; no text is read."""

    spec: FactorSpec


def plan_calibration(loaded: LoadedModel, method: Method, options: CalibrationOptions) -> CodebookPlan | FactorPlan:
    """Check the request and fill in defaults.

    Raises UsageError for bits, head_dim, budgets and sizes that cannot work; KvqError where a package is missing.
    """
    spec = method.calibration(loaded.shape)
    if isinstance(spec, FactorSpec):
        return FactorPlan(loaded, method, spec)
    settings = options.resolve(loaded, max(spec.keys.entries, spec.values.entries))
    unit = math.lcm(2, *(shape.tokens for stream in (spec.keys, spec.values) for shape in stream.shapes))
    return CodebookPlan(loaded, method, spec, settings, capture_size(settings, spec, unit, loaded))

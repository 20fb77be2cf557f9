"""Texts that an artifact was fitted to: scores on them are better than on text that it has not seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvq_cli.data.texts import file_digest


def seen_texts(config: Mapping[str, Any], datasets: Sequence[str]) -> dict[str, str]:
    """Those of the datasets that the artifact was calibrated or tuned on, with what was done there.

    config: an artifact's. Files are compared by their sha256. A named dataset has a split of its own for calibration;
    `kvq tune` chooses the bits of layers on the evaluation split.
    """
    inputs, tuned_on = config.get("inputs", {}), config.get("tuning", {}).get("text", ())
    seen = {}
    for dataset in datasets:
        digest = file_digest(dataset)
        if digest is not None and digest == inputs.get("text"):
            seen[dataset] = "calibrated on this text"
        elif dataset in tuned_on if digest is None else digest in inputs.get("held_out", ()):
            seen[dataset] = "tuned on this text"
    return seen

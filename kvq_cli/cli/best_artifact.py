"""The default of `kvq generate` and `kvq chat`: the model's artifact of klt, else that with the lowest error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli.errors import KvqError
from kvq_cli.paths import model_artifacts

if TYPE_CHECKING:
    from kvq_cli.artifact import Artifact
    from kvq_cli.models import LoadedModel

DEFAULT_BITS = 2
#: The method whose artifacts come first: it diverges least at any number of bits (docs/METHOD.md), and its mean error
#: does not compare with other methods', because it spends its bits on the streams whose errors cost most.
PREFERRED = "klt"


def best_artifact(loaded: LoadedModel, bits: float) -> tuple[Artifact | None, list[str]]:
    """The artifact of the model in artifacts/MODEL at `bits` bits of klt, else that with the lowest calibration error;
    None without.

    Also returns a line for each artifact that was skipped: damaged, or calibrated for another model; and one where the
    others were calibrated on another text, with whose errors its own does not compare.
    """
    from kvq_cli.artifact import fingerprint, load_artifact, read_config

    candidates, refused = _by_error(model_artifacts(loaded.name), bits)
    model = fingerprint(loaded.model) if candidates else None
    for path in candidates:
        try:
            artifact = load_artifact(path)
        except KvqError as error:
            refused.append(f"skipped artifact: {error}")
            continue
        if artifact.fingerprint == model:
            others = {other.name for other in candidates if _text(read_config(other)) != _text(artifact.config)}
            if others and artifact.method_config["name"] != PREFERRED:
                refused.append(
                    f"chosen by its calibration error: {path.name}; {', '.join(sorted(others))} were calibrated on "
                    "other text, where errors differ: choose with --artifact"
                )
            return artifact, refused
        refused.append(f"skipped artifact {path}: its weights are not those of {loaded.name!r}")
    return None, refused


def _by_error(folder: Path, bits: float) -> tuple[list[Path], list[str]]:
    """The artifacts of `bits` bits in `folder`, klt's first, then by error, and a line for each unreadable config."""
    from kvq_cli.artifact import read_config

    found: list[tuple[bool, float, Path]] = []
    refused: list[str] = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith(".") or not (path / "config.json").is_file():
            continue  # a calibration that is running or was interrupted
        try:
            config = read_config(path)
        except KvqError as error:
            refused.append(f"skipped artifact: {error}")
            continue
        measured = calibration_error(config)
        if measured is not None and config["method"].get("bits") == bits:
            found.append((config["method"].get("name") != PREFERRED, measured, path))
    return [path for *_, path in sorted(found)], refused


def _text(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """What an artifact was calibrated on: dataset, the sha256 of a file, and tokens of a sample."""
    settings = config.get("calibration", {})
    return settings.get("dataset"), config.get("inputs", {}).get("text"), settings.get("seqlen")


def calibration_error(config: Mapping[str, Any]) -> float | None:
    """The mean error on held-out samples of all layers' keys and values, with Fisher weights; None where the artifact
    has none: XQuant's factors are computed from the weights.

    config: an artifact's.
    """
    try:
        errors = [float(layer[kind]["chosen"]["fisher"]) for layer in config["errors"]["layers"] for kind in ("k", "v")]
    except (KeyError, TypeError, ValueError):
        return None
    return sum(errors) / len(errors) if errors else None

"""What commands compress with by default: the model's artifact of klt, else that with the lowest error, else kivi."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.paths import model_artifacts

if TYPE_CHECKING:
    from kvq_cli.artifact import Artifact
    from kvq_cli.methods.base import Method

DEFAULT_BITS = 2
#: The method whose artifacts come first: it diverges least at any number of bits (docs/METHOD.md), and its mean error
#: does not compare with other methods', because it spends its bits on the streams whose errors cost most.
PREFERRED = "klt"


def default_method(
    model: str, bits: float | None, fits: Callable[[Artifact], bool], only: str | None = None
) -> tuple[Method | Artifact, str, list[str]]:
    """The model's best artifact at `bits`, or the method without one; why it was chosen; artifacts skipped.

    fits, only: see `best_artifact`. The method without artifact is resolved last: it does not have all bits that
    artifacts have.
    """
    from kvq_cli.resolve import resolve

    best, notes = best_artifact(model, wanted := DEFAULT_BITS if bits is None else bits, fits, only)
    if best is not None:
        why = "calibrated" if best.method_config["name"] == PREFERRED else "lowest calibration error"
        return best, f" (default: {why})", notes
    missing = f"no {wanted:g}-bit artifact{'' if only is None else f' of {only}'} in {model_artifacts(model)}"
    try:
        return resolve(model, bits=bits), f" (default: {missing})", notes
    except UsageError as error:
        raise UsageError("; ".join([*notes, f"--bits {wanted:g}: {missing}, and without one: {error}"])) from None


def method_line(method: Method, attachable: Method | Artifact, reason: str) -> str:
    """`method: kivi, 2 bits (default: no 2-bit artifact in artifacts/smollm2); uncompressed: --method fp16`"""
    if method.nominal_bits == 16:
        return f"method: {method.name}, no compression"
    from kvq_cli.resolve import describe

    folder = "" if isinstance(attachable, type(method)) else f", {describe(attachable)['artifact']}"
    unit = "bit" if method.nominal_bits == 1 else "bits"
    return f"method: {method.name}, {method.nominal_bits:g} {unit}{folder}{reason}; uncompressed: --method fp16"


def best_artifact(
    model: str, bits: float, fits: Callable[[Artifact], bool], only: str | None = None
) -> tuple[Artifact | None, list[str]]:
    """The artifact of the model in artifacts/MODEL at `bits` bits of klt, else that with the lowest calibration error;
    None without.

    fits: whether an artifact belongs to the model's weights. only: the method of artifacts that are considered; None:
    all.

    Also returns a line for each artifact that was skipped: damaged, or calibrated for another model; and one where the
    others were calibrated on another text, with whose errors its own does not compare.
    """
    from kvq_cli.artifact import load_artifact, read_config

    candidates, refused = _by_error(model_artifacts(model), bits, only)
    for path in candidates:
        try:
            artifact = load_artifact(path)
        except KvqError as error:
            refused.append(f"skipped artifact: {error}")
            continue
        if fits(artifact):
            others = {other.name for other in candidates if _text(read_config(other)) != _text(artifact.config)}
            if others and artifact.method_config["name"] != PREFERRED:
                refused.append(
                    f"chosen by its calibration error: {path.name}; {', '.join(sorted(others))} were calibrated on "
                    "other text, where errors differ: choose with --artifact"
                )
            return artifact, refused
        refused.append(f"skipped artifact {path}: its weights are not those of {model!r}")
    return None, refused


def _by_error(folder: Path, bits: float, only: str | None) -> tuple[list[Path], list[str]]:
    """The artifacts of `bits` bits in `folder`, of the method `only` if given, klt's first, then by error, and a line
    for each unreadable config."""
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
        measured, name = calibration_error(config), config["method"].get("name")
        if measured is not None and config["method"].get("bits") == bits and only in (None, name):
            found.append((name != PREFERRED, measured, path))
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

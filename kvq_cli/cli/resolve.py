"""From `--method`, `--bits`, `--artifact` and `--set` to what `attach` takes: a method, or a calibrated artifact."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvq_cli.errors import KvqError, UsageError

if TYPE_CHECKING:
    from kvq_cli.artifact import Artifact
    from kvq_cli.methods.base import Method

DEFAULT_METHOD = "kivi"  # needs no calibration, so that a command without flags works anywhere


def short_name(model: str) -> str:
    """A model's name as the name of a folder: the last part of a Hub id or path."""
    return re.sub(r"[^\w.-]+", "-", model.rstrip("/").rsplit("/", 1)[-1]) or "model"


def artifact_folder(model: str, method: str, bits: int | None) -> Path:
    """Where `kvq calibrate` writes by default and others look: artifacts/reference/temporalkv-2bit."""
    return Path("artifacts") / short_name(model) / (method if bits is None else f"{method}-{bits}bit")


def resolve(
    model: str,
    method: str | None = None,
    bits: int | None = None,
    artifact: Path | None = None,
    options: Mapping[str, str] | None = None,
) -> Method | Artifact:
    """The method to use, built, or its artifact, loaded and verified.

    Raises UsageError for an unknown method or option, bits a method cannot do, or flags that contradict the artifact;
    KvqError, with the `kvq calibrate` command that mends it, where an artifact is missing.
    """
    from kvq_cli.methods.registry import build

    given = dict(options or {}) | ({} if bits is None else {"bits": bits})
    if artifact is not None:
        return _load(artifact, method, given)
    built = build(method or DEFAULT_METHOD, **given)
    if not built.calibrates:
        return built
    folder = artifact_folder(model, built.name, getattr(built, "bits", None))
    if not folder.is_dir():
        raise KvqError(f"{built.name} needs calibration and {folder} does not exist: run `{_calibrate(model, built)}`")
    return _load(folder, built.name, given)


def resolve_compared(
    model: str, names: list[str], bits: int | None = None, artifacts: Sequence[Path] = ()
) -> list[Method | Artifact]:
    """What `--compare fp16,kivi,temporalkv --bits 2` compares; `bits` goes to the methods that have bits to choose.

    A name may carry its own bits (`kivi-4bit`) or be the folder of an artifact. artifacts: folders to use for the
    methods that they hold, in the place of the default ones; those of methods that are not named come last.
    """
    from kvq_cli.methods.registry import method_class

    if len(set(names)) < len(names):
        raise UsageError(f"--compare {','.join(names)}: names a method twice")
    given = [_load(folder, None, {}) for folder in artifacts]
    chosen: list[Method | Artifact] = []
    for name in names:
        if (Path(name) / "config.json").is_file() or "/" in name:
            chosen.append(_load(Path(name), None, {}))
            continue
        found = re.fullmatch(r"(.+)-(\d+)bit", name)
        name, own = (found[1], int(found[2])) if found else (name, bits)
        own = own if any(f.name == "bits" for f in dataclasses.fields(method_class(name))) else None
        mine = [one for one in given if one.method_config["name"] == name and own in (None, one.method_config["bits"])]
        given = [one for one in given if not any(one is taken for taken in mine)]
        chosen += mine or [resolve(model, name, own)]
    return chosen + given


def describe(chosen: Method | Artifact) -> dict:
    """The method's name and options as plain values, with the artifact's folder where there is one."""
    from kvq_cli.methods.base import Method
    from kvq_cli.methods.registry import to_config

    if isinstance(chosen, Method):
        return to_config(chosen)
    return {**chosen.method_config, "artifact": str(chosen.path)}


def _load(folder: Path, method: str | None, given: Mapping) -> Artifact:
    from kvq_cli.artifact import load_artifact
    from kvq_cli.methods.registry import build

    loaded = load_artifact(folder)
    config = loaded.method_config
    if method is not None and method != config["name"]:
        raise UsageError(f"--method {method}: the artifact {folder} holds {config['name']}; drop one of the two flags")
    wanted = build(config["name"], **given)
    for key in given:
        if getattr(wanted, key) != config[key]:
            raise UsageError(
                f"{key}={getattr(wanted, key)}: the artifact {folder} was calibrated with {key}={config[key]}; "
                "calibrate again with the other value"
            )
    return loaded


def _calibrate(model: str, method: Method) -> str:
    """The command that makes the missing artifact."""
    words = ["kvq", "calibrate", "--method", method.name]
    words += [] if model == "reference" else ["--model", model]
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if field.name == "bits":
            words += ["--bits", str(value)]
        elif value != field.default:
            words += ["--set", f"{field.name}={value}"]
    return shlex.join(words)

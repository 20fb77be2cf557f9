"""From `--method`, `--bits`, `--artifact` and `--set` to what `attach` takes: a method, or a calibrated artifact."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.paths import artifact_folder

if TYPE_CHECKING:
    from kvq_cli.artifact import Artifact
    from kvq_cli.methods.base import Method

DEFAULT_METHOD = "kivi"  # needs no calibration, so that a command without flags works anywhere


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
    folder = artifact_folder(model, built)
    if not folder.is_dir():
        if not needs_artifact(model, built):
            return built
        command = shlex.join(["kvq", *calibration(model, built)])
        raise KvqError(f"{built.name} needs calibration and {folder} does not exist: run `{command}`")
    return _load(folder, built.name, given)


def resolve_compared(
    model: str,
    names: Sequence[str],
    bits: int | None = None,
    artifacts: Sequence[Path] = (),
    options: Mapping[str, str] | None = None,
) -> list[Method | Artifact]:
    """What `--compare fp16,kivi:residual=32,temporalkv --bits 2` compares.

    A name may carry its own bits (`kivi-4bit`) and options (`kivi:sinks=8:recent=32`), or be the folder of an artifact.
    `bits` and `options` go to all methods that have them. artifacts: folders to use for the methods that they hold, in
    the place of the default ones; those of methods that are not named come last.
    """
    from kvq_cli.artifact import load_artifact
    from kvq_cli.methods.registry import check_shared, has_option, parse

    if len(set(names)) < len(names):
        raise UsageError(f"--compare {','.join(names)}: names a method twice")
    shared = dict(options or {}) | ({} if bits is None else {"bits": bits})
    given = [load_artifact(folder) for folder in artifacts]
    compared: list[str] = []
    chosen: list[Method | Artifact] = []

    def add(artifact: Artifact | None, name: str, own: Mapping) -> None:
        all_options = {key: value for key, value in shared.items() if has_option(name, key)} | own
        compared.append(name)
        chosen.append(_overridden(artifact, all_options) if artifact else resolve(model, name, options=all_options))

    for text in names:
        name, own = (text, {}) if (Path(text) / "config.json").is_file() else parse(text)
        if (Path(name) / "config.json").is_file() or "/" in name:
            found = load_artifact(Path(name))
            add(found, found.method_config["name"], own)
            continue
        wanted = own.get("bits", shared.get("bits") if has_option(name, "bits") else None)
        mine = [
            one
            for one in given
            if one.method_config["name"] == name and str(wanted) in ("None", str(one.method_config.get("bits")))
        ]
        given = [one for one in given if not any(one is other for other in mine)]
        for one in mine or [None]:
            add(one, name, own)
    for one in given:
        add(one, one.method_config["name"], {})
    check_shared(compared, shared)
    return chosen


def needs_artifact(model: str, method: Method) -> bool:
    """Some methods that calibrate have nothing to calibrate for some models."""
    from kvq_cli.models import configured_shape

    try:
        return method.needs_artifact(configured_shape(model))
    except KvqError:  # the name of a random model, or none that can be read: loading it says what is wrong
        return True


def describe(chosen: Method | Artifact) -> dict:
    """The method's name and options as plain values, with the artifact's folder where there is one."""
    from kvq_cli.methods.base import Method
    from kvq_cli.methods.registry import to_config

    if isinstance(chosen, Method):
        return to_config(chosen)
    return {**chosen.method_config, "artifact": str(chosen.path)}


def _load(folder: Path, method: str | None, given: Mapping) -> Artifact:
    from kvq_cli.artifact import load_artifact

    loaded = load_artifact(folder)
    config = loaded.method_config
    if method is not None and method != config["name"]:
        raise UsageError(f"--method {method}: the artifact {folder} holds {config['name']}; drop one of the two flags")
    return _overridden(loaded, given)


def _overridden(artifact: Artifact, given: Mapping) -> Artifact:
    """The artifact with other values of the options that do not change what is calibrated (`runtime` options)."""
    from kvq_cli.methods.registry import build, from_config, method_class

    config = artifact.method_config
    held = from_config(config)  # an older artifact does not name an option that came later
    runtime = {f.name for f in dataclasses.fields(method_class(config["name"])) if f.metadata.get("runtime")}
    wanted = build(config["name"], **given)
    changed = {key: getattr(wanted, key) for key in given if getattr(wanted, key) != getattr(held, key)}
    for key, value in changed.items():
        if key not in runtime:
            raise UsageError(
                f"{key}={value}: the artifact {artifact.path} was calibrated with {key}={getattr(held, key)}; "
                "calibrate again with the other value"
            )
    return dataclasses.replace(artifact, config={**artifact.config, "method": {**config, **changed}})


def calibration(model: str, method: Method) -> list[str]:
    """The command, after `kvq`, that makes the method's artifact; options that can be others later are left out."""
    words = ["calibrate", "--method", method.name]
    words += [] if model == "reference" else ["--model", model]
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if field.metadata.get("runtime"):
            continue
        if field.name == "bits":
            words += ["--bits", str(value)]
        elif value != field.default:
            words += ["--set", f"{field.name}={value}"]
    return words

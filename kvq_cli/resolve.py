"""Resolve names, or `--method`, `--bits`, `--artifact` and `--set`, to a method or an artifact for `attach`."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.options import option_text
from kvq_cli.paths import artifact_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvq_cli.artifact import Artifact
    from kvq_cli.methods.base import Method

DEFAULT_METHOD = "kivi"  # needs no calibration: a command without flags works for every model


def named(text: str | os.PathLike, model: PreTrainedModel, own: str | None = None) -> Method | Artifact:
    """The method or artifact for a loaded model by name: "kivi-2bit", "klt-2.25bit:join_keys=on", an artifact's folder,
    or its id on the Hub. own: the model's name, where that is not what transformers loaded it from.

    Raises UsageError for an unknown method, option or bits, KvqError for an artifact that is missing or damaged.
    """
    from kvq_cli.artifact import is_artifact
    from kvq_cli.methods.registry import build
    from kvq_cli.models import model_name, model_shape

    name, options = _parsed(text)
    if is_artifact(text) or is_artifact(name):
        return _load(Path(name)).with_options(options)
    method, own = build(name, **options), model_name(model) if own is None else own
    found = _calibrated(method, own) if own else None
    if found is not None:
        return found.with_options(options)
    if method.needs_artifact(model_shape(model)):
        made = f"run `{_command(method, own)}`" if own else "calibrate the model"
        raise KvqError(f"{text} needs calibration: {made}, or pass the artifact of kvq_cli.calibrate(model, ...)")
    return method


def resolve(
    model: str,
    method: str | None = None,
    bits: float | None = None,
    artifact: Path | None = None,
    options: Mapping[str, str] | None = None,
    *,
    trust_remote_code: bool = False,
) -> Method | Artifact:
    """Build the method, or load and verify its artifact if it needs calibration.

    Raises UsageError for an unknown method or option, unsupported bits, or flags that contradict the artifact; KvqError
    with the `kvq calibrate` command to run if the artifact is missing.
    """
    from kvq_cli.methods.registry import build

    given: dict[str, Any] = dict(options or {}) | ({} if bits is None else {"bits": bits})
    if artifact is not None:
        return _fitted(_load(artifact, method), given, model, trust_remote_code)
    built = build(method or DEFAULT_METHOD, **given)
    if (found := _calibrated(built, model)) is not None:
        return _fitted(found, given, model, trust_remote_code)
    if not built.calibrates or not needs_artifact(model, built, trust_remote_code):
        return built
    folder, command = artifact_folder(model, built), _command(built, model, trust_remote_code)
    raise KvqError(f"{built.name} needs calibration and {folder} does not exist: run `{command}`")


def _calibrated(method: Method, model: str) -> Artifact | None:
    """The artifact of the method in the model's folder; None where there is none, or the method needs none."""
    folder = artifact_folder(model, method)
    return _load(folder, method.name) if method.calibrates and folder.is_dir() else None


def _command(method: Method, model: str, trust_remote_code: bool = False) -> str:
    return shlex.join(["kvq", *calibrate_command(model, method, trust_remote_code)])


def resolve_compared(
    model: str,
    names: Sequence[str],
    bits: float | None = None,
    artifacts: Sequence[Path] = (),
    options: Mapping[str, str] | None = None,
    *,
    trust_remote_code: bool = False,
) -> list[Method | Artifact]:
    """Resolve `--compare fp16,kivi:residual=32,temporalkv --bits 2` to methods and artifacts.

    names:         methods, with bits (`kivi-4bit`) and options (`kivi:sinks=8:recent=32`) of their own, or artifacts:
                   folders or ids on the Hub.
    bits, options: apply to all methods that have them.
    artifacts:     folders that replace the default artifacts of their methods, in every configuration that they were
                   calibrated for; those of unnamed methods come last.
    """
    from kvq_cli.artifact import is_artifact
    from kvq_cli.methods.registry import check_shared, has_option

    if len(set(names)) < len(names):
        raise UsageError(f"--compare {','.join(names)}: names a method twice")
    shared: dict[str, Any] = dict(options or {}) | ({} if bits is None else {"bits": bits})
    given = [_load(folder) for folder in artifacts]
    requests = [_parsed(text) for text in names]
    offered = [_offered(given, name, own, shared) for name, own in requests]
    taken = [
        [artifact for artifact in some if _takes(artifact, own)]
        for (_, own), some in zip(requests, offered, strict=True)
    ]
    used = {id(artifact) for some in taken for artifact in some}
    compared: list[str] = []
    resolved: list[Method | Artifact] = []

    def add(name: str, own: Mapping[str, Any], artifact: Artifact | None = None) -> None:
        all_options = {key: value for key, value in shared.items() if has_option(name, key)} | dict(own)
        compared.append(name)
        if artifact is not None:
            resolved.append(_fitted(artifact, all_options, model, trust_remote_code))
        else:
            resolved.append(resolve(model, name, options=all_options, trust_remote_code=trust_remote_code))

    for (name, own), some, fitting in zip(requests, offered, taken, strict=True):
        for artifact in some:
            if id(artifact) not in used:
                artifact.with_options(own)  # raises: the name asks for another calibration
        if is_artifact(name):
            artifact = _load(Path(name))
            add(artifact.method_config["name"], own, artifact)
        elif not fitting:
            add(name, own)
        for artifact in fitting:
            add(name, own, artifact)
    for artifact in given:
        if id(artifact) not in used:
            add(artifact.method_config["name"], {}, artifact)
    check_shared(compared, shared)
    return resolved


def _parsed(text: str | os.PathLike) -> tuple[str, dict[str, Any]]:
    """A method, or an artifact's folder or id, and options of its own. UsageError for an empty name."""
    from kvq_cli.artifact import is_artifact
    from kvq_cli.methods.registry import parse

    name = os.fspath(text)
    is_folder = is_artifact(text) and (Path(name) / "config.json").is_file()
    name, options = (name, {}) if is_folder else parse(name)
    if not name.strip():
        raise UsageError(f"{text!r} names nothing: give a method, or the folder or id of an artifact")
    return name, options


def _offered(given: Sequence[Artifact], name: str, own: Mapping[str, Any], shared: Mapping[str, Any]) -> list[Artifact]:
    """The given artifacts of a compared method, with the bits that it asks for."""
    from kvq_cli.artifact import is_artifact
    from kvq_cli.methods.registry import has_option

    if is_artifact(name):
        return []
    wanted = own.get("bits", shared.get("bits") if has_option(name, "bits") else None)
    return [
        artifact
        for artifact in given
        if artifact.method_config["name"] == name and fits_bits(name, wanted, artifact.method_config.get("bits"))
    ]


def _takes(artifact: Artifact, own: Mapping[str, Any]) -> bool:
    """Whether the artifact can be attached with a compared method's own options."""
    try:
        artifact.with_options(own)
    except UsageError:
        return False
    return True


def fits_bits(method: str, wanted: Any, held: float | None) -> bool:
    """Whether a method's artifact of `held` bits has the bits that a comparison asks for: all have where it names none,
    or where the method's bits can be changed at run time."""
    from kvq_cli.methods.registry import is_runtime

    if wanted is None or is_runtime(method, "bits"):
        return True
    return str(wanted) in {str(held), "None" if held is None else f"{held:g}"}


def needs_artifact(model: str, method: Method, trust_remote_code: bool = False) -> bool:
    """Whether the method needs an artifact for this model: some have nothing to calibrate for some models."""
    from kvq_cli.models import configured_shape

    try:
        return method.needs_artifact(configured_shape(model, trust_remote_code=trust_remote_code))
    except KvqError:  # unreadable config, or name of a random model: loading the model reports the error
        return True


def describe(attachable: Method | Artifact) -> dict[str, Any]:
    """Name and options of the method as plain values, and the folder of its artifact, if any."""
    from kvq_cli.methods.base import Method
    from kvq_cli.methods.registry import to_config

    if isinstance(attachable, Method):
        return to_config(attachable)
    return {**attachable.method_config, "artifact": str(attachable.path)}


def _load(folder: Path, method: str | None = None) -> Artifact:
    from kvq_cli.artifact import load_artifact

    loaded = load_artifact(folder)
    held = loaded.method_config["name"]
    if method is not None and method != held:
        raise UsageError(f"--method {method}: the artifact {folder} holds {held}; drop one of the two flags")
    return loaded


def _fitted(artifact: Artifact, given: Mapping[str, Any], model: str, trust_remote_code: bool) -> Artifact:
    """The artifact with the given options, checked against the model's architecture; its weights are not read."""
    from kvq_cli.models import model_config

    changed = artifact.with_options(given)
    try:
        config = model_config(model, trust_remote_code)
    except KvqError:  # loading the model reports the error
        return changed
    changed.check_config(config, model)
    return changed


def calibrate_command(model: str, method: Method, trust_remote_code: bool = False) -> list[str]:
    """Arguments of `kvq` that calibrate the method's artifact; options that can be changed at run time are left out."""
    words = ["calibrate", "--method", method.name]
    words += [] if model == "reference" else ["--model", model]
    words += ["--trust-remote-code"] if trust_remote_code else []
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if field.metadata.get("runtime"):
            continue
        if field.name == "bits":
            words += ["--bits", f"{value:g}"]
        elif value != field.default:
            words += ["--set", f"{field.name}={option_text(value)}"]
    return words

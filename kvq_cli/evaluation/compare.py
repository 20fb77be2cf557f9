"""Methods and artifacts side by side: each gets a label, and an identity that its results depend on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvq_cli.artifact import Artifact
from kvq_cli.errors import UsageError
from kvq_cli.evaluation.base import Subject
from kvq_cli.evaluation.results import digest
from kvq_cli.methods.registry import from_config, to_config

if TYPE_CHECKING:
    from kvq_cli.methods.base import Method


def subjects(chosen: Sequence[Method | Artifact]) -> list[Subject]:
    """Subjects with labels like `fp16`, `kivi-2bit`, told apart by options or folder where needed.

    Their own folders have all options that are not at their default, and the artifact's digest, in their names.
    """
    found = [_subject(one) for one in chosen]
    if len({digest(one.identity) for one in found}) < len(found):
        raise UsageError("the comparison names the same method with the same options twice")
    found = _told_apart(found, _by_options)
    found = _told_apart(found, lambda one, _: one.chosen.path.name if isinstance(one.chosen, Artifact) else one.label)
    return _told_apart(found, lambda one, _: f"{one.label}-{digest(one.identity)[:4]}")


def _told_apart(found: list[Subject], label: Callable[[Subject, list[Subject]], str]) -> list[Subject]:
    """Give a new label to those that share theirs; `label` gets the subject and all that share its label."""
    alike = {one.label: [other for other in found if other.label == one.label] for one in found}
    return [replace(one, label=label(one, alike[one.label])) if len(alike[one.label]) > 1 else one for one in found]


def _by_options(one: Subject, alike: list[Subject]) -> str:
    """The label with the options in which it differs from the others and from the default: `kivi-2bit,sinks=8`."""
    differ = {
        key: value
        for key, value in _changed(one.method).items()
        if any(other.identity["method"][key] != value for other in alike)
    }
    return _with_options(one.label, differ)


def _changed(method: Method) -> dict[str, object]:
    """The options that are not at their default; bits stand in every label."""
    default = to_config(type(method)())
    return {key: value for key, value in to_config(method).items() if key != "bits" and value != default[key]}


def _with_options(label: str, options: Mapping[str, object]) -> str:
    return ",".join([label, *(f"{key}={_said(value)}" for key, value in options.items())])


def _said(value: object) -> object:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _subject(chosen: Method | Artifact) -> Subject:
    if isinstance(chosen, Artifact):
        method = from_config(chosen.method_config)
        identity = {"method": to_config(method), "artifact": chosen.digest}
    else:
        method = chosen
        identity = {"method": to_config(method)}
    bits = getattr(method, "bits", None)
    label = method.name if bits is None else f"{method.name}-{bits}bit"
    calibrated = {"artifact": chosen.digest[:8]} if isinstance(chosen, Artifact) else {}
    return Subject(label, _with_options(label, _changed(method) | calibrated), method, chosen, identity)

"""Labels, result folders and identities of the methods and artifacts that are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvq_cli.artifact import Artifact
from kvq_cli.errors import UsageError
from kvq_cli.evaluation.base import ComparedMethod
from kvq_cli.evaluation.sample_log import digest
from kvq_cli.methods.registry import from_config, to_config

if TYPE_CHECKING:
    from kvq_cli.methods.base import Method

#: Options that say which tokens stay in full precision: measured bits show their effect.
WINDOW_OPTIONS = ("sinks", "recent", "residual", "buffer")
#: Longer texts, such as the methods of all layers of `mixed`, are named by their digest: file names have 255 bytes.
MAX_TEXT = 40


def compared_methods(attachables: Sequence[Method | Artifact]) -> list[ComparedMethod]:
    """Give each method or artifact a unique label like `kivi-2bit` or `innerq-2bit,sign=inside`.

    A label has the options that are not the default, but for windows, long texts, and those that all methods with the
    option share (`--set`); where labels collide, it has these or the artifact's folder, too.
    Result folders are named by all non-default options and the artifact's digest. UsageError if two are identical.
    """
    compared = [_compared_method(attachable) for attachable in attachables]
    if len({digest(one.identity) for one in compared}) < len(compared):
        raise UsageError("the comparison names the same method with the same options twice")
    compared = [replace(one, label=_label_with_format(one, compared)) for one in compared]
    compared = _relabel_collisions(compared, _label_with_options)
    compared = _relabel_collisions(compared, lambda one, _: _artifact_name(one))
    return _relabel_collisions(compared, lambda one, _: f"{one.label}-{digest(one.identity)[:4]}")


def _label_with_format(one: ComparedMethod, compared: Sequence[ComparedMethod]) -> str:
    """The label and the non-default options, windows and long texts aside, that not all of several methods share."""

    def hidden(key: str, value: object) -> bool:
        if key in WINDOW_OPTIONS or len(str(value)) > MAX_TEXT:
            return True
        values = [other.identity["method"][key] for other in compared if key in other.identity["method"]]
        return len(values) > 1 and all(each == value for each in values)

    options = _non_default_options(one.method).items()
    return _join_options(one.label, {k: v for k, v in options if not hidden(k, v)})


def _relabel_collisions(
    compared: list[ComparedMethod], relabel: Callable[[ComparedMethod, list[ComparedMethod]], str]
) -> list[ComparedMethod]:
    """Relabel the methods whose label is not unique; `relabel` gets the method and all that share its label."""
    same = {one.label: [other for other in compared if other.label == one.label] for one in compared}
    return [replace(one, label=relabel(one, same[one.label])) if len(same[one.label]) > 1 else one for one in compared]


def _label_with_options(one: ComparedMethod, same: list[ComparedMethod]) -> str:
    """The label and the non-default options in which it differs from the others: `kivi-2bit,sinks=8`."""
    different = {
        key: value
        for key, value in _non_default_options(one.method).items()
        if any(other.identity["method"].get(key) != value for other in same)
    }
    return _join_options(one.label, different)


def _artifact_name(one: ComparedMethod) -> str:
    return one.attachable.path.name if isinstance(one.attachable, Artifact) else one.label


def _non_default_options(method: Method) -> dict[str, object]:
    """Options that differ from their default, without bits, which are part of every label."""
    default = to_config(type(method)())
    return {key: value for key, value in to_config(method).items() if key != "bits" and value != default.get(key)}


def _join_options(label: str, options: Mapping[str, object]) -> str:
    return ",".join([label, *(f"{key}={_option_text(value)}" for key, value in options.items())])


def _option_text(value: object) -> object:
    if isinstance(value, bool):
        return "on" if value else "off"
    return digest({"text": value})[:8] if len(str(value)) > MAX_TEXT else value


def _compared_method(attachable: Method | Artifact) -> ComparedMethod:
    if isinstance(attachable, Artifact):
        method = from_config(attachable.method_config)
        identity = {"method": to_config(method), "artifact": attachable.digest}
    else:
        method = attachable
        identity = {"method": to_config(method)}
    bits = getattr(method, "bits", None)
    label = method.name if bits is None else f"{method.name}-{bits:g}bit"
    artifact = {"artifact": attachable.digest[:8]} if isinstance(attachable, Artifact) else {}
    folder = _join_options(label, _non_default_options(method) | artifact)
    return ComparedMethod(label, folder, method, attachable, identity)

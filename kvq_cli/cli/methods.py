"""`kvq methods`: the compression methods, or the options of one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from kvq_cli.cli.options import Json
from kvq_cli.cli.output import Output

if TYPE_CHECKING:
    from kvq_cli.methods.base import Method

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="Show the options of this method.")]


def methods(name: Name = None, as_json: Json = False) -> None:
    """List the compression methods, or the options of one."""
    out = Output(as_json=as_json)
    from kvq_cli.methods.registry import method_class, method_names

    if name is None:
        found = [_about(method_class(each)) for each in method_names()]
        rows = [[m["name"], m["bits"], "yes" if m["calibrates"] else "no", m["summary"]] for m in found]
        out.table(["method", "bits", "calibrates", "what it is"], rows)
        out.result(found)
        return
    about = _about(method_class(name))
    about["options"] = options = _options(method_class(name))
    out.text(f"{name}: {about['summary']}\n{about['paper']}".strip())
    if options:
        rows = [[o["name"], _said(o["default"]), o["help"], _valid(o)] for o in options]
        out.table(["option", "default", "what it is", "valid"], rows)
        out.text("Set one with --set OPTION=VALUE (bits also with --bits).")
    out.result(about)


def _about(cls: type[Method]) -> dict:
    bits = [f for f in dataclasses.fields(cls) if f.name == "bits"]
    choices = ", ".join(map(str, bits[0].metadata["choices"])) if bits else "-"
    return {
        "name": cls.name,
        "bits": choices,
        "calibrates": cls.calibrates,
        "summary": cls.summary,
        "paper": cls.paper,
    }


def _options(cls: type[Method]) -> list[dict]:
    keys = ("help", "choices", "at_least", "at_most")
    return [
        {"name": f.name, "default": f.default, **{k: f.metadata.get(k) for k in keys}} for f in dataclasses.fields(cls)
    ]


def _valid(option: dict) -> str:
    if option["choices"]:
        return ", ".join(map(_said, option["choices"]))
    ends = [f"{sign} {option[key]}" for key, sign in (("at_least", ">="), ("at_most", "<=")) if option[key] is not None]
    return " and ".join(ends) or ("on, off" if isinstance(option["default"], bool) else "")


def _said(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "none" if value is None else str(value)

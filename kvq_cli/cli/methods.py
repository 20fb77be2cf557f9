"""`kvq methods`: list the compression methods, or the options of one method."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvq_cli.cli.options import Json
from kvq_cli.cli.output import Output
from kvq_cli.options import option_fields, option_text

if TYPE_CHECKING:
    from kvq_cli.methods.base import Method

SHAPE, CONTEXT = "llama-3.1-8b", 4096
"""Model and context length for the sizes in the list."""

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="Name of a method, to list its options.")]


def methods(name: Name = None, as_json: Json = False) -> None:
    """List the compression methods, or the options of one method."""
    out = Output(as_json=as_json)
    from kvq_cli.methods.recommended import recommended
    from kvq_cli.methods.registry import method_class, method_names

    if name is None:
        listed = [{**_description(method_class(each)), **_sizes(each)} for each in method_names()]
        rows = [
            [m["name"], m["bits"], m["caches"], m["finds"] or "-", m["nominal_bits"]]
            + [round(m["packed_bits"], 2), round(m["measured_bits"], 2)]
            for m in listed
        ]
        columns = ["method", "bits", "caches", "calibrates", "nominal", "packed", "measured"]
        out.table(columns, rows)
        out.prose(
            f"nominal, packed, measured: bits per cached number at the defaults, {SHAPE}, {CONTEXT:,} tokens; packed "
            "adds scales and outliers; measured adds full-precision windows and unused room (`kvq bits`)"
        )
        out.prose("`kvq methods NAME` explains one method and its options")
        out.result(listed)
        return
    about = _description(method_class(name))
    about["options"] = options = _options(method_class(name))
    out.prose(f"{name}: {about['summary']}\n{about['paper']}".strip())
    out.prose(f"caches {about['caches']}" + (f"; calibrates {about['finds']}" if about["finds"] else ""))
    if options:
        rows = [[o["name"], option_text(o["default"]), o["help"], _valid_values(o)] for o in options]
        out.table(["option", "default", "description", "valid values"], rows)
        out.prose("Set one with --set OPTION=VALUE (bits also with --bits).")
    about["recommended"] = [dataclasses.asdict(each) for each in recommended(name)]
    if found := recommended(name):
        first = found[0]
        out.prose(
            f"Better than the defaults beyond chance ({first.windows} windows of {first.tokens:,} tokens; "
            "docs/SETTINGS.md has all settings measured; about 3 of 100 would seem better by chance):"
        )
        for each in found:
            out.prose(str(each))
    out.result(about)


def _description(cls: type[Method]) -> dict[str, Any]:
    bits = {field.name: field.metadata for field in dataclasses.fields(cls)}.get("bits")
    return {
        "name": cls.name,
        "bits": "-" if bits is None else _range_text(bits),
        "caches": cls.caches,
        "calibrates": cls.calibrates,
        "finds": cls.calibration_result,
        "summary": cls.summary,
        "paper": cls.paper,
    }


def _range_text(meta: Mapping[str, Any]) -> str:
    """`2, 3, 4`, or `1 to 8` where all numbers between are valid."""
    choices = meta["choices"]
    return ", ".join(map(str, choices)) if choices else f"{meta['at_least']:g} to {meta['at_most']:g}"


def _sizes(name: str) -> dict[str, float]:
    """Bits per cached number of the method with default options; nothing is allocated."""
    from kvq_cli.benchmarking.accounting import account
    from kvq_cli.benchmarking.shapes import SHAPES
    from kvq_cli.methods.registry import build

    report = account(build(name), SHAPES[SHAPE].model_shape(), CONTEXT).to_dict()
    return {key: report[key] for key in ("nominal_bits", "packed_bits", "measured_bits")}


def _options(cls: type[Method]) -> list[dict[str, Any]]:
    keys = ("help", "choices", "at_least", "at_most")
    return [{"name": f.name, "default": f.default, **{k: f.metadata.get(k) for k in keys}} for f in option_fields(cls)]


def _valid_values(option: dict[str, Any]) -> str:
    if option["choices"]:
        return ", ".join(map(option_text, option["choices"]))
    bounds = [
        f"{sign} {option[key]}" for key, sign in (("at_least", ">="), ("at_most", "<=")) if option[key] is not None
    ]
    return " and ".join(bounds) or ("on, off" if isinstance(option["default"], bool) else "")

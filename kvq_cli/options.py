"""Options of methods and studies: the fields of a dataclass, given as words."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from kvq_cli.errors import UsageError

_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def parse_options(cls: type, owner: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` as the fields of the dataclass `cls` want them: strings are read as the field's type.

    owner: whose options they are, for the UsageError that names what was valid: "method kivi".
    """
    kinds = typing.get_type_hints(cls)
    valid = [field.name for field in dataclasses.fields(cls)]
    for key in options:
        if key not in valid:
            listed = f"its options are: {', '.join(valid)}" if valid else "it has no options"
            raise UsageError(f"{owner} has no option {key!r}; {listed}")
    return {key: _typed(owner, key, value, kinds[key]) for key, value in options.items()}


def _typed(owner: str, key: str, value: Any, kind: Any) -> Any:
    """`value` as the option's type `kind` (int, float, bool, str, or one of these or None), or as several of these,
    joined by commas, where that is a tuple."""
    if typing.get_origin(kind) is tuple:
        parts = value.replace(" ", "").split(",") if isinstance(value, str) else value
        return tuple(_typed(owner, key, part, kind.__args__[0]) for part in parts)
    optional = isinstance(kind, types.UnionType) and type(None) in kind.__args__
    if optional:
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        kind = next(k for k in kind.__args__ if k is not type(None))
    try:
        if isinstance(value, str):
            value = _WORDS[value.lower()] if kind is bool else kind(value)
        elif kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
    except (KeyError, ValueError):
        pass
    whole_number = kind is int and not isinstance(value, bool)
    # "nan" and "inf" are floats to Python, pass comparisons with bounds, and end in wrong numbers.
    number = kind is float and isinstance(value, float) and math.isfinite(value)
    if isinstance(value, kind) and (kind in (bool, str) or whole_number or number):
        return value
    raise UsageError(f"{owner}: {key}={value!r} is not {_spoken(kind)}{' or none' if optional else ''}")


def _spoken(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}[kind]

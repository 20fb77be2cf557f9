"""Parse options of methods and studies: strings or values for the fields of a dataclass."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from kvq_cli.errors import UsageError, did_you_mean

#: Largest whole number of an option, which PyTorch takes as an index.
MAX_INTEGER = 2**63 - 1
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def parse_options(cls: type, owner: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` converted to the types of the fields of dataclass `cls`; strings are parsed.

    owner: for messages, such as "method kivi". Raises UsageError naming the valid options, or the expected type.
    """
    types_ = typing.get_type_hints(cls)
    valid = [field.name for field in option_fields(cls)]
    for key in options:
        if key not in valid:
            listed = f"its options are: {', '.join(valid)}" if valid else "it has no options"
            raise UsageError(f"{owner} has no option {key!r}; {listed}{did_you_mean(key, valid)}")
    return {key: _parse(owner, key, value, types_[key]) for key, value in options.items()}


def option_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """The fields of a dataclass of options: its own, then those that all classes of its kind have."""
    return sorted(dataclasses.fields(cls), key=lambda field: bool(field.kw_only))


def option_text(value: object) -> str:
    """An option's value as it is typed: `on`, `none`, `1,2`; floats exactly, in the shortest form."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return min(f"{value:g}", repr(value), key=lambda word: (float(word) != value, len(word)))
    if isinstance(value, tuple | list):
        return ",".join(map(option_text, value))
    return "none" if value is None else str(value)


def _parse(owner: str, key: str, value: Any, kind: Any) -> Any:
    """`value` as type `kind`: int, float, bool, str, one of these or None, or a tuple of these, separated by commas."""
    if typing.get_origin(kind) is tuple:
        parts = value.replace(" ", "").split(",") if isinstance(value, str) else value
        return tuple(_parse(owner, key, part, kind.__args__[0]) for part in parts)
    optional = isinstance(kind, types.UnionType) and type(None) in kind.__args__
    if optional:
        if value is None or (isinstance(value, str) and value.lower() == "none"):
            return None
        kind = next(k for k in kind.__args__ if k is not type(None))
    try:
        if isinstance(value, str):
            value = _BOOLEANS[value.lower()] if kind is bool else kind(value)
        elif kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
    except (KeyError, ValueError, OverflowError):
        pass
    # No option is larger, and Python refuses to print integers of thousands of digits.
    large = isinstance(value, int) and abs(value) > MAX_INTEGER
    whole_number = kind is int and not isinstance(value, bool) and not large
    # "nan" and "inf" parse as floats, but pass comparisons with bounds and give wrong results.
    number = kind is float and isinstance(value, float) and math.isfinite(value)
    if isinstance(value, kind) and (kind in (bool, str) or whole_number or number):
        return value
    shown = f"a number of {value.bit_length():,} bits" if large else repr(value)
    raise UsageError(f"{owner}: {key}={shown} is not {_type_name(kind)}{' or none' if optional else ''}")


def _type_name(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "on or off", str: "a word"}[kind]

"""The keys and types of an artifact's `config.json`; unknown, missing and repeated keys are refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvq_cli.errors import KvqError
from kvq_cli.options import MAX_INTEGER

#: Largest number of layers, heads and channels: above all models, and small enough to compute with.
MAX_SIZE = 2**20


@dataclass(frozen=True)
class Whole:
    """A whole number in a range."""

    at_least: int = 0
    at_most: int = MAX_INTEGER

    def __str__(self) -> str:
        return f"a whole number from {self.at_least:,} to {self.at_most:,}"


@dataclass(frozen=True)
class OneOf:
    """One of these values."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return " or ".join(json.dumps(value) for value in self.values)


@dataclass(frozen=True)
class OrNone:
    """A value of this type, or null."""

    type: type

    def __str__(self) -> str:
        return f"{_NAMES[self.type]} or null"


@dataclass(frozen=True)
class Many:
    """A list of `count` items of one form; None: of any length."""

    form: Form
    count: int | None = None

    def __str__(self) -> str:
        return "a list" if self.count is None else f"a list of {self.count:,}"


#: A mapping from keys to forms ("name?" may be absent), a class above, a list of forms, or a type.
Form: TypeAlias = "dict[str, Form] | Whole | OneOf | OrNone | Many | type"

_NUMBER, _SIZE = Whole(), Whole(1, MAX_SIZE)
#: `Fingerprint.to_dict`.
FINGERPRINT: Form = {
    "model_type": str,
    "layers": _SIZE,
    "query_heads": _SIZE,
    "kv_heads": _SIZE,
    "head_dim": _SIZE,
    "hidden_size": _SIZE,
    "weights": str,
    "attention?": Many(Whole(0, MAX_SIZE)),  # of a model with layers without a compressed cache
}
#: A model's dtype.
DTYPE = OneOf(("bfloat16", "float16", "float32", "float64"))
_MEASURED: Form = {"bits": float, "kl": float}
#: The record of `kvq tune`. tried: configurations in order, of which `chosen` is an index; predicted: the least KL at
#: other bits; alone: of each stream, KL where klt of a rate compresses it alone (format 1: so many codes).
TUNING: Form = {
    "objective": OneOf(("kl", "memory")),
    "budget": float,
    "kl": OrNone(float),
    "candidates": Many(str),
    "text": Many(str),
    "windows": _NUMBER,
    "seqlen": _NUMBER,
    "chosen": _NUMBER,
    "tried": Many({"step": str, "bits": float, "kl": float, "keys": str, "values": str}),
    "predicted": Many(_MEASURED),
    "alone": Many(Many({"rate?": _NUMBER, "codes?": _NUMBER, "kl": float})),
}
#: What tensors depend on beside method, model and calibration. text: sha256 of the file of `--dataset`, null for a data
#: set with a name; held_out: those of `--text`, of `kvq tune`; results: `kvq_cli.RESULTS`;
#: clustering: `calibration.kmeans.VERSION` of methods that cluster.
INPUTS: Form = {
    "weights": str,
    "text": OrNone(str),
    "held_out?": Many(OrNone(str)),
    "results": _NUMBER,
    "clustering?": _NUMBER,
    "device": str,
}
CONFIG: Form = {
    "format": Whole(1),
    "kvq": str,
    "method": dict,
    "model": {
        "name": str,
        "revision": OrNone(str),
        "dtype": DTYPE,
        "fingerprint": FINGERPRINT,
        "trust_remote_code?": OneOf((True,)),
    },
    "calibration": dict,
    "inputs?": INPUTS,  # not in older artifacts
    "versions": {"torch": str, "transformers": str, "faiss?": str},
    "sizes": dict,
    "captured?": {"tokens": _NUMBER, "tokens_with_gradients": _NUMBER, "tokens_held_out": _NUMBER},
    "errors": {"measure": str, "layers": list},
    "tuning?": dict,
    "files": {"tensors.safetensors": {"bytes": _NUMBER, "sha256": str}},
    "checksum": str,
}
#: `calibration` of a method that clusters activations: the fields of `CalibrationSettings`.
CALIBRATION: Form = {
    "dataset": str,
    "samples": _NUMBER,
    "seqlen": _NUMBER,
    "gradients": _NUMBER,
    "points": _NUMBER,
    "iterations": _NUMBER,
    "damping": float,
    "budget": float,
    "seed": _NUMBER,
    "kmeans?": str,  # not in artifacts of version 0.1
}
#: `calibration` of a method that factorizes weights for activations on text.
TEXT: Form = {"dataset": str, "samples": _NUMBER, "seqlen": _NUMBER, "seed": _NUMBER}
#: Control characters, which a terminal obeys: an artifact may come from anyone, and its strings are printed.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_NAMES = {str: "a string without control characters", float: "a finite number", dict: "a mapping", list: "a list"}


def parse_json(data: bytes) -> Any:
    """The JSON value in `data`. Raises ValueError for anything else, for repeated keys and for NaN, RecursionError for
    deep nesting."""

    def refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a key is repeated")
        return found

    def refuse_constant(text: str) -> Any:
        raise ValueError(f"{text} is not a JSON number")

    return json.loads(data, object_pairs_hook=refuse_repeated, parse_constant=refuse_constant)


def check_form(value: Any, form: Form, where: str) -> None:
    """Raise KvqError, naming the entry, unless `value` has the form. where: the entry's name, `FILE: key.key`."""
    if isinstance(form, dict):
        _check_keys(value, form, where)
    elif isinstance(form, Many):
        if type(value) is not list or form.count not in (None, len(value)):
            raise KvqError(f"{where} must be {form}")
        for index, item in enumerate(value):
            check_form(item, form.form, f"{where}[{index}]")
    elif not _fits(value, form):
        raise KvqError(f"{where} must be {_NAMES[form] if isinstance(form, type) else form}")


def _fits(value: Any, form: Whole | OneOf | OrNone | type) -> bool:
    if isinstance(form, Whole):
        return type(value) is int and form.at_least <= value <= form.at_most
    if isinstance(form, OneOf):
        return any(type(value) is type(valid) and value == valid for valid in form.values)
    if isinstance(form, OrNone):
        return value is None or _fits(value, form.type)
    if form is float:
        return type(value) in (int, float) and abs(value) <= MAX_INTEGER and math.isfinite(value)
    if form is str:
        return type(value) is str and not _CONTROL.search(value)
    return type(value) is form


def _check_keys(value: Any, form: Mapping[str, Form], where: str) -> None:
    if type(value) is not dict:
        raise KvqError(f"{where} must be a mapping")
    forms = {key.removesuffix("?"): item for key, item in form.items()}
    required = {key for key in form if not key.endswith("?")}
    for key in value:
        if key not in forms:
            raise KvqError(f"{where}: unknown key {key[:80]!r}; valid: {', '.join(forms) or 'none'}")
    separator = "." if ": " in where else ": "
    for key, item in forms.items():
        if key in value:
            check_form(value[key], item, f"{where}{separator}{key}")
        elif key in required:
            raise KvqError(f"{where}{separator}{key} is missing")

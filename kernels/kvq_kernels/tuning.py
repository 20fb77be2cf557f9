"""Tuned launch configurations: a committed table per operation, `OPERATION/tuning.json`.

    {"*": {"*": {"tokens": 64, "warps": 4}, "uniform": {...}}, "sm_90": {"uniform/2bit": {...}}}

GPU family -> shape class -> values. Family "*" is for GPUs that were never measured, class "*" for any shape. Classes
go from the general to the special, parts joined by "/": without "uniform/2bit/rows8" in the table, "uniform/2bit" is
used, then "uniform". `kvq bench tune` adds its results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

FILE = "tuning.json"
ANY = "*"


def configuration(operation: str, key: str, device: torch.device | str) -> dict[str, int]:
    """Tuned values of one operation (a folder of this package) for a shape class.

    device: where it runs, or the name of a GPU family ("sm_90", "gfx942"; "cpu": the interpreter). The family's entries
    are preferred to those for any GPU, and special classes to general ones. KeyError without any entry.
    """
    gpu = device if isinstance(device, str) else family(device)
    values = dict(_find(operation, key, gpu))
    trial = _TRIALS.get(operation)
    if trial is not None:
        if trial.key in (None, key):
            values |= trial.values
        trial.looked_up[key] = dict(values)
    return values


@dataclass
class Trial:
    """Values that replace tuned ones, for one class or (key None) for all. looked_up: class -> values that
    `configuration` returned."""

    values: dict[str, int]
    key: str | None = None
    looked_up: dict[str, dict[str, int]] = field(default_factory=dict)


@contextmanager
def trying(operation: str, values: dict[str, int], key: str | None = None) -> Iterator[Trial]:
    """Inside the block, `configuration` returns these values instead of the table's, for one class or for all."""
    trial = Trial(values, key)
    before = _TRIALS.get(operation)
    _TRIALS[operation] = trial
    try:
        yield trial
    finally:
        del _TRIALS[operation]
        if before is not None:
            _TRIALS[operation] = before


_TRIALS: dict[str, Trial] = {}


def family(device: torch.device) -> str:
    """GPU family of a device: "sm_90", "gfx942", ...; "cpu" where kernels run in the interpreter."""
    if device.type != "cuda":
        return "cpu"
    properties = _properties(torch.cuda.current_device() if device.index is None else device.index)
    # Builds for CUDA have a gcnArchName, too: it is the device's name.
    return properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"


def table(operation: str) -> dict[str, dict[str, dict[str, int]]]:
    """Table of an operation: family -> class -> values."""
    return json.loads(_path(operation).read_text(encoding="utf-8"))


def extend(operation: str, gpu: str, measured: dict[str, dict[str, int]]) -> Path:
    """Write measured values (class -> values) of a GPU family into the operation's table; returns its path.

    Other classes are unchanged. OSError if the package's folder cannot be written.
    """
    updated = table(operation)
    updated[gpu] = dict(sorted((updated.get(gpu, {}) | measured).items()))
    path = _path(operation)
    new = path.with_suffix(".json.new")
    new.write_text(text(updated), encoding="utf-8")
    new.replace(path)
    _find.cache_clear()
    return path


@lru_cache(maxsize=4096)
def _find(operation: str, key: str, gpu: str) -> dict[str, int]:
    families = table(operation)
    for name, classes in ((gpu, _classes(key)), (ANY, [*_classes(key), ANY])):
        for shape_class in classes:
            if shape_class in families.get(name, {}):
                return families[name][shape_class]
    raise KeyError(f"{_path(operation)} has no configuration {key!r} for {gpu}, and no default")


def _classes(key: str) -> list[str]:
    """The class itself, then more and more general ones."""
    parts = key.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _path(operation: str) -> Path:
    return Path(__file__).parent / operation / FILE


@cache
def _properties(index: int) -> Any:
    return torch.cuda.get_device_properties(index)


def text(families: dict[str, dict[str, dict[str, int]]]) -> str:
    """JSON of a table with one line per class, for readable diffs."""
    parts = []
    for gpu, classes in families.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(values)}" for key, values in classes.items()]
        parts.append(f" {json.dumps(gpu)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"

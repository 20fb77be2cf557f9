"""How each kernel is laid out on each GPU: a committed table per operation, `OPERATION/tuning.json`.

    {"*": {"*": {"tokens": 64, "warps": 4}, "uniform": {...}}, "sm_90": {"uniform/2bit": {...}}}

GPU family -> shape class -> numbers. Family "*" serves a GPU that was never measured; class "*" serves any shape.
A class is written from the general to the special, parts joined by "/": where "uniform/2bit/rows8" is not in the table,
"uniform/2bit" serves it, then "uniform". `kvq bench kernels --tune` adds what it measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, lru_cache
from pathlib import Path

import torch

FILE = "tuning.json"
ANY = "*"


def configuration(operation: str, key: str, device: torch.device | str) -> dict[str, int]:
    """The numbers of one operation (a folder of this package) for a shape class.

    device: where it runs, or the name of a GPU family ("sm_90", "gfx942"; "cpu": the interpreter).
    What was measured on the family goes before what is known of none; then the more special class goes first.
    KeyError if the operation's table has neither the class nor a default.
    """
    gpu = device if isinstance(device, str) else family(device)
    found = dict(_find(operation, key, gpu))
    trial = _TRIALS.get(operation)
    if trial is not None:
        if trial.key in (None, key):
            found |= trial.numbers
        trial.asked[key] = dict(found)
    return found


@dataclass
class Trial:
    """numbers: that stand instead of the table's, for one class or (key None) for all. asked: what was asked for, by
    class, with what was given."""

    numbers: dict[str, int]
    key: str | None = None
    asked: dict[str, dict[str, int]] = field(default_factory=dict)


@contextmanager
def trying(operation: str, numbers: dict[str, int], key: str | None = None) -> Iterator[Trial]:
    """Inside the block `configuration` gives these numbers instead of the table's, for one class or for all."""
    trial = Trial(numbers, key)
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
    """ "sm_90", "gfx942", ...; "cpu" where kernels run in the interpreter."""
    if device.type != "cuda":
        return "cpu"
    properties = _properties(torch.cuda.current_device() if device.index is None else device.index)
    name = getattr(properties, "gcnArchName", "")
    return name.split(":")[0] if name else f"sm_{properties.major}{properties.minor}"


def table(operation: str) -> dict[str, dict[str, dict[str, int]]]:
    """The whole table of an operation: family -> class -> numbers."""
    return json.loads(_path(operation).read_text(encoding="utf-8"))


def extend(operation: str, gpu: str, found: dict[str, dict[str, int]]) -> Path:
    """Write what was measured on a GPU family (class -> numbers) into the operation's table; the file's path.

    Classes that were not measured now stay as they are. OSError where the package's folder cannot be written.
    """
    known = table(operation)
    known[gpu] = dict(sorted((known.get(gpu, {}) | found).items()))
    path = _path(operation)
    whole = path.with_suffix(".json.new")
    whole.write_text(text(known), encoding="utf-8")
    whole.replace(path)
    _find.cache_clear()
    return path


@lru_cache(maxsize=4096)
def _find(operation: str, key: str, gpu: str) -> dict[str, int]:
    known = table(operation)
    for name, classes in ((gpu, _classes(key)), (ANY, [*_classes(key), ANY])):
        for one in classes:
            if one in known.get(name, {}):
                return known[name][one]
    raise KeyError(f"{_path(operation)} has no configuration {key!r} for {gpu}, and no default")


def _classes(key: str) -> list[str]:
    """The class itself, then ever more general ones."""
    parts = key.split("/")
    return ["/".join(parts[:end]) for end in range(len(parts), 0, -1)]


def _path(operation: str) -> Path:
    return Path(__file__).parent / operation / FILE


@cache
def _properties(index: int):
    return torch.cuda.get_device_properties(index)


def text(known: dict) -> str:
    """A table as JSON with one line per class, so that a change can be read."""
    families = []
    for gpu, classes in known.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(numbers)}" for key, numbers in classes.items()]
        families.append(f" {json.dumps(gpu)}: {{\n" + ",\n".join(lines) + "\n }")
    return "{\n" + ",\n".join(families) + "\n}\n"

"""The registry of compression methods: names to classes, options to instances.

A method is one file of this package with one class under `@register`; nothing else lists it. Other packages add
methods as entry points of the group `kvq.methods`, and `kvq --plugin FILE.py` those of a file (docs/ADD_A_METHOD.md).
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import pkgutil
import re
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from kvq_cli.errors import KvqError, UsageError, did_you_mean
from kvq_cli.methods.base import Method
from kvq_cli.options import parse_options

_CLASSES: dict[str, type[Method]] = {}
_NO_METHODS = {"base", "codebooks", "recommended", "registry", "tensors", "window"}
#: Group of the entry points `NAME = "module:Class"` of other packages' methods.
PLUGINS = "kvq.methods"
#: Environment variable: Python files with methods, joined as in PATH. Worker and server processes inherit it.
PLUGIN_FILES = "KVQ_PLUGINS"


def register(cls: type[Method]) -> type[Method]:
    """Class decorator: register a method under `cls.name`; ValueError for a name that is taken."""
    if cls.name in _CLASSES:
        raise ValueError(f"method name {cls.name!r} is already taken by {_CLASSES[cls.name].__qualname__}")
    _CLASSES[cls.name] = cls
    return cls


def method_names() -> list[str]:
    """All names, sorted."""
    _load_all()
    return sorted(_CLASSES)


def method_class(name: str) -> type[Method]:
    """The class of a method; UsageError lists the valid names."""
    _load_all()
    if name not in _CLASSES:
        known = sorted(_CLASSES)
        raise UsageError(f"unknown method {name!r}; there are: {', '.join(known)}{did_you_mean(name, known)}")
    return _CLASSES[name]


def build(name: str, **options: Any) -> Method:
    """The method `name` with `options`; strings are parsed. UsageError names the valid options and values."""
    cls = method_class(name)
    return cls(**parse_options(cls, f"method {name}", options))


def has_option(name: str, option: str) -> bool:
    """Whether the method takes this option."""
    return any(field.name == option for field in dataclasses.fields(method_class(name)))


def is_runtime(name: str, option: str) -> bool:
    """Return whether the method has this option, and its artifacts can be used with any value of it."""
    fields = dataclasses.fields(method_class(name))
    return any(field.name == option and field.metadata.get("runtime") for field in fields)


def check_shared(names: Iterable[str], options: Iterable[str]) -> None:
    """Raise UsageError for an option that none of several methods has; `bits` is always accepted."""
    names = list(names)
    known = {field.name for name in names for field in dataclasses.fields(method_class(name))}
    for option in options:
        if option != "bits" and option not in known:
            raise UsageError(
                f"--set {option}=...: none of the methods {', '.join(dict.fromkeys(names))} has this option"
                f"{did_you_mean(option, sorted(known))}"
            )


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Parse `kivi-4bit:residual=32:sinks=8` into a name and options, `bits` included. A path keeps its `-4bit`."""
    name, *pairs = text.split(":")
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"{text}: an option must be OPTION=VALUE, like kivi:sinks=8")
        key = key.strip().replace("-", "_")
        if key in options:
            raise UsageError(f"{text}: sets {key} twice: leave out one of them")
        options[key] = value.strip()
    if "/" not in name and (match := re.fullmatch(r"(.+)-(\d{1,20}(?:\.\d{1,20})?)bit", name)):
        if "bits" in options:
            raise UsageError(f"{text}: sets bits twice, in its name and as an option: leave out one of them")
        name, options["bits"] = match[1], float(match[2]) if "." in match[2] else int(match[2])
    return name, options


def build_parsed(text: str, **shared: Any) -> Method:
    """The method of `parse(text)`, with those of the `shared` options that it has and the text does not set."""
    name, options = parse(text)
    return build(name, **{key: value for key, value in shared.items() if has_option(name, key)} | options)


def to_config(method: Method) -> dict[str, Any]:
    """`{"name": ..., **options}`, plain JSON values. Of the options that all methods have, those that are set: earlier
    versions had none."""
    common = [(field.name, field.default) for field in dataclasses.fields(Method)]
    options = dataclasses.asdict(method)
    return {"name": method.name, **{key: options[key] for key in options if (key, options[key]) not in common}}


def from_config(config: Mapping[str, Any]) -> Method:
    """The inverse of `to_config`; unknown keys are refused."""
    options = dict(config)
    if "name" not in options:
        raise UsageError("a method's configuration needs the key 'name'")
    return build(options.pop("name"), **options)


def _load_all() -> None:
    package = importlib.import_module("kvq_cli.methods")
    for module in pkgutil.iter_modules(package.__path__):
        if module.name not in _NO_METHODS:
            importlib.import_module(f"kvq_cli.methods.{module.name}")
    _load_plugins()


@cache
def _load_plugins() -> None:
    for entry in entry_points(group=PLUGINS):
        _load_plugin(entry)
    for path in filter(None, os.environ.get(PLUGIN_FILES, "").split(os.pathsep)):
        _load_file(Path(path))


def _load_file(path: Path) -> None:
    """Run a Python file that registers methods; KvqError where it fails or registers none."""
    before, name = set(_CLASSES), f"kvq_plugin_{path.stem}"
    spec = spec_from_file_location(name, path, loader=SourceFileLoader(name, str(path)))
    module = sys.modules[name] = module_from_spec(spec)  # type: ignore[arg-type]  # dataclasses look the module up
    try:
        spec.loader.exec_module(module)  # type: ignore[union-attr]
    except Exception as error:
        raise KvqError(f"--plugin {path}: cannot be imported: {type(error).__name__}: {error}") from error
    if set(_CLASSES) == before:
        raise KvqError(
            f"--plugin {path}: registers no method: decorate its class with kvq_cli.methods.registry.register"
        )


def _load_plugin(entry: EntryPoint) -> None:
    """Import another package's method; KvqError names the package where it cannot be used."""
    package = entry.dist.name if entry.dist is not None else entry.value
    try:
        cls = entry.load()
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise KvqError(f"package {package}: its method {entry.name} cannot be imported: {why}") from error
    if _CLASSES.get(entry.name) is not cls:
        raise KvqError(f"package {package}: {entry.value} is not registered as a method with name = {entry.name!r}")

"""Default paths of artifacts."""

from __future__ import annotations

import dataclasses
import re
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvq_cli.methods.base import Method


#: Most characters of the options in a folder's name: file systems take names of 255.
_MAX_OPTIONS = 100


def short_name(model: str) -> str:
    """The last part of a model's Hub id or path, as a folder name; of `.` and `..`, the name of that folder."""
    last = model.rstrip("/").rsplit("/", 1)[-1]
    if last in (".", ".."):
        last = Path(model).resolve().name
    return re.sub(r"[^\w.-]+", "-", last) or "model"


def model_artifacts(model: str) -> Path:
    """The default folder of a model's artifacts, such as artifacts/reference."""
    return Path("artifacts") / short_name(model)


def artifact_folder(model: str, method: Method) -> Path:
    """The default folder of a method's artifact, such as artifacts/reference/temporalkv-2bit.

    Calibration options that differ from their defaults are appended: temporalkv-2bit-fisher-off. The first digits of
    their sha256 stand for many of them, as for the methods of all layers: mixed-2.25bit-1f3a90c4.
    """
    name, options = method.name, ""
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if field.metadata.get("runtime"):
            continue
        if field.name == "bits":
            name += f"-{value:g}bit"
        elif value != field.default:
            text = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
            options += f"-{field.name.replace('_', '-')}-{text}"
    if len(options) > _MAX_OPTIONS:
        options = f"-{sha256(options.encode()).hexdigest()[:8]}"
    return model_artifacts(model) / (name + options)

"""Where artifacts lie by default."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvq_cli.methods.base import Method


def short_name(model: str) -> str:
    """A model's name as the name of a folder: the last part of a Hub id or path."""
    return re.sub(r"[^\w.-]+", "-", model.rstrip("/").rsplit("/", 1)[-1]) or "model"


def artifact_folder(model: str, method: Method) -> Path:
    """Where `kvq calibrate` writes by default and others look: artifacts/reference/temporalkv-2bit.

    Options that the calibration depends on and that are not at their default follow: temporalkv-2bit-fisher-off.
    """
    name = method.name
    for field in dataclasses.fields(method):
        value = getattr(method, field.name)
        if field.metadata.get("runtime"):
            continue
        if field.name == "bits":
            name += f"-{value}bit"
        elif value != field.default:
            said = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
            name += f"-{field.name.replace('_', '-')}-{said}"
    return Path("artifacts") / short_name(model) / name

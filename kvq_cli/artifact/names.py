"""Names of an artifact's files, and which names are those of artifacts."""

from __future__ import annotations

import os
from pathlib import Path

CONFIG_FILE, TENSOR_FILE, CARD_FILE = "config.json", "tensors.safetensors", "README.md"


def is_artifact(text: str | os.PathLike) -> bool:
    """Whether a name is that of an artifact, its folder or its id on the Hub, and not of a method."""
    return "/" in os.fspath(text) or (Path(text) / CONFIG_FILE).is_file()


def is_artifact_file(name: str) -> bool:
    """Whether an artifact may have a file of this name; `.png`: a picture of the card."""
    return name in (CONFIG_FILE, TENSOR_FILE, CARD_FILE) or name.endswith(".png")

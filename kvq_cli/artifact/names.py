"""Names of an artifact's files, and which names are those of artifacts."""

from __future__ import annotations

import os
from pathlib import Path

CONFIG_FILE, TENSOR_FILE, CARD_FILE = "config.json", "tensors.safetensors", "README.md"
#: Picture of a tuned artifact's card.
TUNING_FILE = "tuning.png"


def is_artifact(text: str | os.PathLike) -> bool:
    """Return whether a name is that of an artifact, its folder or its id on the Hub, and not of a method.

    A method's name, with bits or without, is the method, also where a folder has that name: `./klt-2bit`, or a Path, is
    the folder.
    """
    from kvq_cli.methods.registry import method_names, parse

    name = os.fspath(text)
    if not name or "/" in name:
        return bool(name)
    method, _ = parse(name.partition(":")[0])
    return (Path(name) / CONFIG_FILE).is_file() and (text is not name or method not in method_names())


def is_artifact_file(name: str) -> bool:
    """Return whether an artifact may have a file of this name; `.png`: a picture of the card. It has no folders."""
    return name in (CONFIG_FILE, TENSOR_FILE, CARD_FILE) or (name.endswith(".png") and "/" not in name)

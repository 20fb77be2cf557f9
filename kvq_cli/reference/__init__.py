"""The built-in reference model, a small Llama that retrieves from its context: weights, prompt format; built-in texts.

Made by tools/reference_model. Importing this package does not import torch.
"""

from __future__ import annotations

import lzma
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
DOCUMENT_END = "\n<|doc|>\n"
"""The separator of documents in `data/prose.txt.xz`, and of the splits in `data/pydoc.txt.xz`."""
SPLITS = ("calibration", "evaluation")


def model_path() -> Path:
    """The folder of the reference model, in the Hugging Face format."""
    return _HERE / "model"


@cache
def documents(split: str) -> tuple[str, ...]:
    """The documents of a split of the built-in prose, which the reference model was not trained on.

    The split `calibration` is the first half by length, `evaluation` (perplexity, haystacks) the second.
    """
    _check_split(split)
    text = _read("prose.txt.xz")
    chosen, before = [], 0
    for document in text.split(DOCUMENT_END):
        in_second_half = before >= len(text) / 2
        before += len(document)
        if document.strip() and in_second_half == (split == "evaluation"):
            chosen.append(document.strip())
    return tuple(chosen)


def prose(split: str) -> str:
    """The documents of a split (`calibration` or `evaluation`) as one text, joined by blank lines."""
    return "\n\n".join(documents(split))


@cache
def pydoc(split: str) -> str:
    """A split (`calibration` or `evaluation`) of Python's documentation; see tools/reference_model/python_topics.py."""
    _check_split(split)
    return _read("pydoc.txt.xz").split(DOCUMENT_END)[SPLITS.index(split)]


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r} of a built-in text; valid: {', '.join(SPLITS)}")


def _read(name: str) -> str:
    return lzma.decompress((_HERE / "data" / name).read_bytes()).decode("utf-8")

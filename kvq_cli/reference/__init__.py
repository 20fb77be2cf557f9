"""The built-in reference model: a small Llama that retrieves from its context, its prose and its training recipe.

Importing this package does not import torch.
"""

from __future__ import annotations

import lzma
from functools import cache
from pathlib import Path

_HERE = Path(__file__).parent
DOCUMENT_END = "\n<|doc|>\n"
"""What separates documents in `data/prose.txt.xz` and in the texts that the model is trained on."""
SPLITS = ("calibration", "evaluation")


def model_path() -> Path:
    """Folder of the reference model in the Hugging Face format."""
    return _HERE / "model"


@cache
def documents(split: str) -> tuple[str, ...]:
    """Documents of the bundled prose that the reference model never saw.

    `calibration` is the first half of them by length, `evaluation` (perplexity, haystacks) the second.
    """
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r} of the built-in prose; valid: {', '.join(SPLITS)}")
    text = lzma.decompress((_HERE / "data" / "prose.txt.xz").read_bytes()).decode("utf-8")
    found, before = [], 0
    for document in text.split(DOCUMENT_END):
        in_second_half = before >= len(text) / 2
        before += len(document)
        if document.strip() and in_second_half == (split == "evaluation"):
            found.append(document.strip())
    return tuple(found)


def prose(split: str) -> str:
    """The documents of one split (`calibration` or `evaluation`) as one text, two line breaks between them."""
    return "\n\n".join(documents(split))

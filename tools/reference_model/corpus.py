"""Text files into one array of tokens on disk."""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from .tokenizer import EOS, build

MARK = "<|doc|>"
HELD_OUT = 1_600_000
"""Characters of the last whole documents that no model is trained on: the bundled prose comes from them."""


def read_documents(files: Sequence[Path], held_out: int = HELD_OUT) -> tuple[list[str], list[str]]:
    """(training, held-out) documents of plain or .xz text; a last document that is cut short is dropped."""
    found: list[str] = []
    for file in files:
        raw = file.read_bytes()
        text = (lzma.decompress(raw) if file.suffix == ".xz" else raw).decode("utf-8")
        parts = [part.strip() for part in text.split(MARK)]
        found += parts[:-1] if len(parts) > 1 else parts
    found = [part for part in found if part]
    if len(found) == 1:
        # A text without marks is one document: paragraphs are what can be held out of it.
        found = [part for part in found[0].split("\n\n") if part.strip()]
    held_out = min(held_out, sum(map(len, found)) // 20)
    size, cut = 0, len(found)
    while cut > 1 and size < held_out:
        cut -= 1
        size += len(found[cut])
    return found[:cut], found[cut:]


def prepare(files: Sequence[Path], folder: Path, forms: Iterable[str], vocabulary: int = 4096, say=print) -> None:
    """Make ``tokenizer.json``, ``tokens.npy`` and ``held_out.txt`` in `folder`, unless they are there already.

    `forms` are texts of the tasks: a few of them in the tokenizer's training make their fixed words single tokens.
    """
    from tokenizers import Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "tokens.npy").exists():
        return
    documents, held_out = read_documents(files)
    (folder / "held_out.txt").write_text(f"\n{MARK}\n".join(held_out), encoding="utf-8")
    if not (folder / "tokenizer.json").exists():
        say("training the tokenizer")
        step = max(1, sum(map(len, documents)) // 24_000_000)
        tokenizer = build([*documents[::step], *forms], vocabulary)
        tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(EOS)
    pieces = []
    for start in range(0, len(documents), 256):
        for encoded in tokenizer.encode_batch_fast(documents[start : start + 256]):
            pieces.append(np.asarray([*encoded.ids, end], dtype=np.uint16))
        say(f"reading text: {min(start + 256, len(documents))} of {len(documents)} documents", end="\r")
    tokens = np.concatenate(pieces)
    # The file appears under its name only when it is whole: its presence is what a later run goes by.
    np.save(folder / "tokens.tmp.npy", tokens)
    (folder / "tokens.tmp.npy").rename(folder / "tokens.npy")
    say(f"\n{len(tokens) / 1e6:.1f}M tokens of prose")

"""Prepares the training corpus: text files -> a tokenizer, an array of token ids on disk, and held-out text."""

from __future__ import annotations

import lzma
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from .tokenizer import EOS, build

DOCUMENT_SEPARATOR = "<|doc|>"
HELD_OUT = 1_600_000
"""Characters of the last documents, which are held out of training; the bundled prose was taken from them."""


def read_documents(files: Sequence[Path], held_out: int = HELD_OUT) -> tuple[list[str], list[str]]:
    """Training and held-out documents of plain or .xz text files. The last document of a file may be cut short and is
    dropped, unless it is the only one."""
    documents: list[str] = []
    for file in files:
        raw = file.read_bytes()
        text = (lzma.decompress(raw) if file.suffix == ".xz" else raw).decode("utf-8")
        parts = [part.strip() for part in text.split(DOCUMENT_SEPARATOR)]
        documents += parts[:-1] if len(parts) > 1 else parts
    documents = [document for document in documents if document]
    if len(documents) == 1:
        # A text without separators is a single document, of which paragraphs can be held out.
        documents = [paragraph for paragraph in documents[0].split("\n\n") if paragraph.strip()]
    held_out = min(held_out, sum(map(len, documents)) // 20)
    size, cut = 0, len(documents)
    while cut > 1 and size < held_out:
        cut -= 1
        size += len(documents[cut])
    return documents[:cut], documents[cut:]


def prepare(
    files: Sequence[Path],
    folder: Path,
    task_texts: Iterable[str],
    vocabulary: int = 4096,
    log: Callable[..., None] = print,
) -> None:
    """Write `tokenizer.json`, `tokens.npy` and `held_out.txt` to `folder`, unless `tokens.npy` exists.

    task_texts: texts of the tasks, added to the tokenizer's training so that their fixed words become single tokens.
    """
    from tokenizers import Tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "tokens.npy").exists():
        return
    documents, held_out = read_documents(files)
    (folder / "held_out.txt").write_text(f"\n{DOCUMENT_SEPARATOR}\n".join(held_out), encoding="utf-8")
    if not (folder / "tokenizer.json").exists():
        log("training the tokenizer")
        step = max(1, sum(map(len, documents)) // 24_000_000)
        tokenizer = build([*documents[::step], *task_texts], vocabulary)
        tokenizer.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(EOS)
    pieces = []
    for start in range(0, len(documents), 256):
        for encoded in tokenizer.encode_batch_fast(documents[start : start + 256]):
            pieces.append(np.asarray([*encoded.ids, end], dtype=np.uint16))
        log(f"reading text: {min(start + 256, len(documents))} of {len(documents)} documents", end="\r")
    tokens = np.concatenate(pieces)
    # Renamed when complete, because a later run takes the file's existence as proof of that.
    np.save(folder / "tokens.tmp.npy", tokens)
    (folder / "tokens.tmp.npy").rename(folder / "tokens.npy")
    log(f"\n{len(tokens) / 1e6:.1f}M tokens of prose")

"""The papers' texts, WikiText-2, C4 and PTB: from the Hugging Face Hub, or from a local copy in the same rows.

The splits are those of GPTQ and KVQuant: calibration on the training text; evaluation on WikiText-2's test text, the
first shard of C4's validation text, and PTB's validation text.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq_cli.data.local import file_format, read_rows, read_text, split_files
from kvq_cli.errors import KvqError

OFFLINE = "prose, pydoc, self, or a .txt, .jsonl or .parquet file"


@dataclass(frozen=True)
class HubText:
    """One data set, its splits named `calibration` and `evaluation`.

    arguments: what `datasets.load_dataset` takes; names: folders of a local copy; files: its files, without ending;
    column: the field with the text; lines: whether a text file has a row in each line, with its line break or without.
    """

    arguments: Mapping[str, Mapping[str, Any]]
    names: tuple[str, ...]
    files: Mapping[str, tuple[str, ...]]
    column: str
    lines: str = ""  # "", "whole" or "stripped"


def _splits(calibration: Any, evaluation: Any) -> dict[str, Any]:
    return {"calibration": calibration, "evaluation": evaluation}


_WIKITEXT = {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1"}
_C4 = {"path": "allenai/c4", "split": "train"}
_PTB = "hf://datasets/ptb-text-only/ptb_text_only@refs/convert/parquet/penn_treebank/{}/0000.parquet"
HUB: Mapping[str, HubText] = {
    "wikitext2": HubText(
        _splits(_WIKITEXT | {"split": "train"}, _WIKITEXT | {"split": "test"}),
        ("wikitext2", "Salesforce/wikitext/wikitext-2-raw-v1"),
        _splits(("train",), ("test",)),
        "text",
        "whole",
    ),
    "c4": HubText(
        _splits(
            _C4 | {"data_files": "en/c4-train.00000-of-01024.json.gz"},
            _C4 | {"data_files": "en/c4-validation.00000-of-00008.json.gz"},
        ),
        ("c4", "allenai/c4/en"),
        _splits(("train", "c4-train.00000-of-01024"), ("validation", "c4-validation.00000-of-00008")),
        "text",
    ),
    "ptb": HubText(
        _splits(
            {"path": "parquet", "data_files": _PTB.format("train"), "split": "train"},
            {"path": "parquet", "data_files": _PTB.format("validation"), "split": "train"},
        ),
        ("ptb", "ptb-text-only/ptb_text_only/penn_treebank"),
        _splits(("train",), ("validation",)),
        "sentence",
        "stripped",
    ),
}


def hub_rows(name: str, split: str, data_dir: Path | None = None) -> list[str]:
    """The rows of a data set's text: of its copy in `data_dir` where that is given, else from the Hub.

    Raises KvqError, with what to do, where there is neither.
    """
    return _from_hub(name, split) if data_dir is None else _from_folder(name, split, data_dir)


def _from_folder(name: str, split: str, data_dir: Path) -> list[str]:
    found = HUB[name]
    for file in found.files[split]:
        if files := split_files(data_dir, found.names, file):
            return [row for path in files for row in _file_rows(path, found)]
    wanted = f"{found.names[0]}/{found.files[split][0]}"
    raise KvqError(
        f"dataset {name!r}: --data-dir {data_dir} has no {wanted}.txt, .jsonl or .parquet; put it there, or drop "
        "--data-dir to load it from the Hub"
    )


def _file_rows(path: Path, found: HubText) -> list[str]:
    if file_format(path) != ".txt":
        return [row[found.column] for row in read_rows(path, found.column)]
    text = read_text(path)
    if found.lines == "whole":  # the Hub's rows: lines with their break, empty ones without
        return [line if line.strip() else "" for line in text.splitlines(keepends=True)]
    return [line.strip() for line in text.splitlines()] if found.lines == "stripped" else [text]


def _from_hub(name: str, split: str) -> list[str]:
    found = HUB[name]
    try:
        import datasets
    except ImportError as error:
        raise KvqError(f"dataset {name!r} needs the package `datasets`: install it, or use {OFFLINE}") from error
    try:
        with silenced_loggers("huggingface_hub", "datasets"):
            return list(datasets.load_dataset(**found.arguments[split])[found.column])
    except Exception as error:  # offline, a proxy's refusal, a moved repository: each library has its own classes
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise KvqError(
            f"dataset {name!r} cannot be loaded ({reason}); without a network use {OFFLINE}, or a copy in --data-dir"
        ) from error


@contextlib.contextmanager
def silenced_loggers(*names: str) -> Iterator[None]:
    """Keep libraries' messages off the screen: what they end in is reported in one line."""
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)

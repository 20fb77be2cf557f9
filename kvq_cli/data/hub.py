"""WikiText-2, C4 and PTB, from the Hugging Face Hub or from a local copy with the same rows.

The splits are those of GPTQ and KVQuant: calibration on the training text; evaluation on WikiText-2's test text, the
first shard of C4's validation text, and PTB's validation text.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvq_cli.data.local import file_format, read_rows, read_text, split_files
from kvq_cli.errors import KvqError
from kvq_cli.extras import install_command

#: Datasets that need no network, for messages.
OFFLINE = "prose, pydoc, self, or a .txt, .jsonl or .parquet file"


@dataclass(frozen=True)
class HubDataset:
    """Where the splits `calibration` and `evaluation` of a dataset come from.

    arguments: of `datasets.load_dataset`, by split.
    names:     folders of a local copy, see `data.local`.
    files:     names of its files without extension, by split.
    column:    the field that holds the text.
    lines:     rows of a local .txt file: "whole" (its lines, with line breaks), "stripped" (its lines, stripped) or ""
               (the file is one row).
    """

    arguments: Mapping[str, Mapping[str, Any]]
    names: tuple[str, ...]
    files: Mapping[str, tuple[str, ...]]
    column: str
    lines: Literal["", "whole", "stripped"] = ""


def _splits(calibration: Any, evaluation: Any) -> dict[str, Any]:
    return {"calibration": calibration, "evaluation": evaluation}


_WIKITEXT = {"path": "Salesforce/wikitext", "name": "wikitext-2-raw-v1"}
_C4 = {"path": "allenai/c4", "split": "train"}
_PTB = "hf://datasets/ptb-text-only/ptb_text_only@refs/convert/parquet/penn_treebank/{}/0000.parquet"
HUB: Mapping[str, HubDataset] = {
    "wikitext2": HubDataset(
        _splits(_WIKITEXT | {"split": "train"}, _WIKITEXT | {"split": "test"}),
        ("wikitext2", "Salesforce/wikitext/wikitext-2-raw-v1"),
        _splits(("train",), ("test",)),
        "text",
        "whole",
    ),
    "c4": HubDataset(
        _splits(
            _C4 | {"data_files": "en/c4-train.00000-of-01024.json.gz"},
            _C4 | {"data_files": "en/c4-validation.00000-of-00008.json.gz"},
        ),
        ("c4", "allenai/c4/en"),
        _splits(("train", "c4-train.00000-of-01024"), ("validation", "c4-validation.00000-of-00008")),
        "text",
    ),
    "ptb": HubDataset(
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
    """The text rows of a split of dataset `name`, from its copy in `data_dir` if that is given, else from the Hub.

    Raises KvqError where the copy or the Hub cannot be read.
    """
    return _from_hub(name, split) if data_dir is None else _from_folder(name, split, data_dir)


def _from_folder(name: str, split: str, data_dir: Path) -> list[str]:
    source = HUB[name]
    for file in source.files[split]:
        if files := split_files(data_dir, source.names, file):
            return [row for path in files for row in _file_rows(path, source)]
    wanted = f"{source.names[0]}/{source.files[split][0]}"
    raise KvqError(
        f"dataset {name!r}: --data-dir {data_dir} has no {wanted}.txt, .jsonl or .parquet; put it there, or drop "
        "--data-dir to load it from the Hub"
    )


def _file_rows(path: Path, source: HubDataset) -> list[str]:
    if file_format(path) != ".txt":
        return [row[source.column] for row in read_rows(path, source.column)]
    text = read_text(path)
    if source.lines == "whole":  # as on the Hub: lines with their line break, empty lines without
        return [line if line.strip() else "" for line in text.splitlines(keepends=True)]
    return [line.strip() for line in text.splitlines()] if source.lines == "stripped" else [text]


def _from_hub(name: str, split: str) -> list[str]:
    source = HUB[name]
    try:
        import datasets
    except ImportError as error:
        raise KvqError(
            f"dataset {name!r} needs the package datasets, which is not installed: {install_command('datasets')}, or "
            f"use {OFFLINE}"
        ) from error
    try:
        with silenced_loggers("huggingface_hub", "datasets"):
            return list(datasets.load_dataset(**source.arguments[split])[source.column])
    except Exception as error:  # offline, proxy errors, moved repositories: every library raises its own classes
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise KvqError(
            f"dataset {name!r} cannot be loaded ({reason}); without a network use {OFFLINE}, or a copy in --data-dir"
        ) from error


@contextlib.contextmanager
def silenced_loggers(*names: str) -> Iterator[None]:
    """Silence these loggers inside the block; failures are reported by the caller in one line."""
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)

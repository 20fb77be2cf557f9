"""Files with text and rows, and where a data set's local copy lies in `--data-dir`.

A copy is a folder under one of the data set's names with one file per split: `gsm8k/test.jsonl`. Files as the Hugging
Face Hub keeps them fit as they are: `openai/gsm8k/main/test-00000-of-00001.parquet`.
"""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvq_cli.errors import KvqError

ENDINGS = (".jsonl", ".json", ".parquet", ".txt")
_OPENERS = {".xz": lzma.open, ".gz": gzip.open}


def split_files(data_dir: Path, names: Sequence[str], split: str) -> list[Path]:
    """The files of one split under the first of `names` that has it: SPLIT.jsonl or SPLIT-*.jsonl (several parts).

    Looks in DIR/NAME and DIR/NAME/data for the endings .jsonl, .json, .parquet, .txt, .gz or .xz behind them or not.
    Empty where there is none.
    """
    for folder in (data_dir / name / inner for name in names for inner in ("", "data")):
        for ending in (ending + packed for ending in ENDINGS for packed in ("", *_OPENERS)):
            found = [folder / (split + ending)]
            if not found[0].is_file():
                found = sorted(folder.glob(f"{split}-*{ending}"))
            if found:
                return found
    return []


def file_format(path: Path) -> str:
    """The ending that says what a file holds: `.jsonl` of `a.jsonl.gz`."""
    return (path.with_suffix("") if path.suffix in _OPENERS else path).suffix


def read_text(path: Path) -> str:
    """A text file whole; .xz and .gz unpack. KvqError where it cannot be read."""
    try:
        with _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            return file.read()
    except (OSError, UnicodeDecodeError, EOFError, lzma.LZMAError) as error:
        raise KvqError(f"cannot read the text of {path}: {error}") from error


def read_rows(path: Path, column: str | None = None) -> list[dict[str, Any]]:
    """The rows of a file with JSON lines, a JSON list or Parquet. KvqError where it is no such file.

    column: a field that every row must have.
    """
    if file_format(path) == ".parquet":
        return _parquet_rows(path, column)
    text = read_text(path)
    if file_format(path) == ".json" and text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise KvqError(f"{path}: not JSON: {error}") from error
        return [_checked(row, column, f"{path}, row {number}") for number, row in enumerate(found, start=1)]
    return _json_lines(text.split("\n"), column, path)


def _json_lines(lines: Iterable[str], column: str | None, path: Path) -> list[dict[str, Any]]:
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            found.append(_checked(row, column, f"{path}, line {number}"))
    return found


def _checked(row: Any, column: str | None, place: str) -> dict[str, Any]:
    if not isinstance(row, dict) or (column is not None and column not in row):
        wanted = f' with the field "{column}"' if column else ""
        raise KvqError(f"{place}: not a JSON object{wanted}")
    return row


def _parquet_rows(path: Path, column: str | None) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise KvqError(
            f"reading {path} needs the package `pyarrow`: install it, or use a .txt or .jsonl file"
        ) from error
    try:
        table = read_table(path)
        return (table if column is None else table.select([column])).to_pylist()
    except (OSError, ArrowException, KeyError) as error:
        wanted = f' with the column "{column}"' if column else ""
        raise KvqError(f"{path} is not a Parquet file{wanted}") from error

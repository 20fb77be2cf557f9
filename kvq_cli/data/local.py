"""Read text files and dataset rows (JSON lines, JSON, Parquet), and find local copies of datasets in `--data-dir`.

A copy is a folder named like the dataset, with one file per split: `gsm8k/test.jsonl`. Files in the layout of the
Hugging Face Hub are read as they are: `openai/gsm8k/main/test-00000-of-00001.parquet`.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

from kvq_cli.errors import KvqError
from kvq_cli.extras import install_command
from kvq_cli.files import MAX_DATASET, file_size, load_json

EXTENSIONS = (".jsonl", ".json", ".parquet", ".txt")
_COMPRESSED = (".xz", ".gz")


def split_files(data_dir: Path, names: Sequence[str], split: str) -> list[Path]:
    """The files of a split: SPLIT.jsonl, or several shards SPLIT-*.jsonl, in the first of the folders `names` with any.

    Looks in DIR/NAME and DIR/NAME/data for .jsonl, .json, .parquet and .txt, plain or compressed (.gz, .xz). Empty
    where there is none.
    """
    for folder in (data_dir / name / inner for name in names for inner in ("", "data")):
        for extension in (extension + suffix for extension in EXTENSIONS for suffix in ("", *_COMPRESSED)):
            file = folder / (split + extension)
            files = [file] if file.is_file() else sorted(folder.glob(f"{split}-*{extension}"))
            if files:
                return files
    return []


def file_format(path: Path) -> str:
    """The extension before any compression suffix: `.jsonl` of `a.jsonl.gz`."""
    return (path.with_suffix("") if path.suffix in _COMPRESSED else path).suffix


def read_text(path: Path) -> str:
    """The contents of a text file, decompressed if it ends with .xz or .gz. KvqError where it cannot be read."""
    try:
        file_size(path, MAX_DATASET)
        with _open_text(path) as file:
            return file.read().removeprefix("\ufeff")  # a byte order mark
    except (OSError, UnicodeDecodeError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise KvqError(f"cannot read the text of {path}: {error}") from error


def _open_text(path: Path) -> TextIO:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return open(path, encoding="utf-8")


def read_rows(path: Path, column: str | None = None) -> list[dict[str, Any]]:
    """The rows of a file with JSON lines, a JSON list or Parquet. KvqError where it cannot be parsed.

    column: a field that must be text in every row.
    """
    if file_format(path) == ".parquet":
        return _parquet_rows(path, column)
    text = read_text(path)
    if file_format(path) == ".json" and text.lstrip().startswith("["):
        try:
            rows = load_json(text)
        except ValueError as error:
            raise KvqError(f"{path}: not JSON: {error}") from error
        return [_checked(row, column, f"{path}, row {number}") for number, row in enumerate(rows, start=1)]
    return _json_lines(text.split("\n"), column, path)


def _json_lines(lines: Iterable[str], column: str | None, path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = load_json(line)
            except ValueError:
                row = None
            rows.append(_checked(row, column, f"{path}, line {number}"))
    return rows


def _checked(row: Any, column: str | None, location: str) -> dict[str, Any]:
    if not isinstance(row, dict) or (column is not None and column not in row):
        wanted = f' with the field "{column}"' if column else ""
        raise KvqError(f"{location}: not a JSON object{wanted}")
    return _with_text(row, column, location)


def _with_text(row: dict[str, Any], column: str | None, location: str) -> dict[str, Any]:
    if column is not None and not isinstance(row[column], str):
        raise KvqError(f'{location}: the field "{column}" is not text: remove the row or fill the field')
    return row


def _parquet_rows(path: Path, column: str | None) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import read_table
    except ImportError as error:
        raise KvqError(
            f"reading {path} needs the package pyarrow, which is not installed: {install_command('datasets')}, or use "
            "a .txt or .jsonl file"
        ) from error
    try:
        file_size(path, MAX_DATASET)
        table = read_table(path)
        rows = (table if column is None else table.select([column])).to_pylist()
    except (OSError, ArrowException, KeyError) as error:
        wanted = f' with the column "{column}"' if column else ""
        raise KvqError(f"{path} is not a Parquet file{wanted}") from error
    return [_with_text(row, column, f"{path}, row {number}") for number, row in enumerate(rows, start=1)]

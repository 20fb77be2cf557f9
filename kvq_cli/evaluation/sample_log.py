"""Sample logs: one JSONL line per finished sample, so that an interrupted evaluation resumes where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvq_cli.errors import KvqError
from kvq_cli.evaluation.base import Record
from kvq_cli.files import cannot_write


def digest(key: Mapping[str, Any]) -> str:
    """The first 10 hex digits of the SHA-256 of a key: everything that a sample's result depends on."""
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:10]


def log_name(evaluation: str, key: Mapping[str, Any]) -> str:
    """File name of a sample log; the key's digest keeps runs with other settings in other files."""
    return f"{evaluation}-{digest(key)}.jsonl"


def read_records(path: Path) -> dict[int, Record]:
    """Read a log's records by sample index.

    An incomplete last line is ignored. If two concurrent runs wrote the same sample, the later record counts. KvqError
    if a line is damaged.
    """
    records = {}
    for number, line in enumerate(path.read_bytes().rpartition(b"\n")[0].splitlines(), start=1):
        try:
            record = json.loads(line)
            if number > 1:  # the first line holds the key
                records[record["index"]] = record
        except (ValueError, KeyError, TypeError):
            raise KvqError(f"{path}, line {number} is damaged: delete the file to evaluate again") from None
    return records


class SampleLog:
    """A JSONL file: the key in its first line, then one record for each finished sample.

    An incomplete last line, left by a killed process, is removed and its sample evaluated again. fresh: discard the
    records of an earlier run. option: the flag that an error about an unwritable folder names.
    """

    def __init__(
        self, folder: Path, name: str, key: Mapping[str, Any], fresh: bool = False, option: str = "--out"
    ) -> None:
        self.path = folder / log_name(name, key)
        self.option = option
        self.records: dict[int, Record] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if fresh or not self._read():
                self.path.write_text(json.dumps({"key": key}, default=str) + "\n", encoding="utf-8")
        except OSError as error:
            raise cannot_write(self.path, error, self.option) from error

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append the records of finished samples; they are on disk when this returns."""
        lines = ""
        for record in records:
            self.records[record["index"]] = dict(record)
            lines += json.dumps(record, ensure_ascii=False) + "\n"
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(lines)
        except OSError as error:
            raise cannot_write(self.path, error, self.option) from error

    def _read(self) -> bool:
        """Read the records of an earlier run; returns whether the file has a complete key line."""
        data = self.path.read_bytes() if self.path.exists() else b""
        complete, newline, incomplete = data.rpartition(b"\n")
        if incomplete:
            with open(self.path, "r+b") as file:
                file.truncate(len(complete) + len(newline))
        self.records = read_records(self.path) if complete else {}
        return bool(complete)

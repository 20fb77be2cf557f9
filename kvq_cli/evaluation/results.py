"""Results on disk: one line per sample as it comes, the summary when all is done; a rerun takes up where it stopped."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kvq_cli.errors import KvqError
from kvq_cli.files import cannot_write


def digest(key: Mapping[str, Any]) -> str:
    """A short name for everything that a sample's result depends on."""
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:10]


def log_file(name: str, key: Mapping[str, Any]) -> str:
    """The name of a log of samples: a run with other settings never mixes with it."""
    return f"{name}-{digest(key)}.jsonl"


def read_records(path: Path) -> dict[int, dict]:
    """A log's records by index, without a last line that was cut short. Of a sample that two runs at once evaluated,
    the later one. KvqError where a line is damaged."""
    found = {}
    for number, line in enumerate(path.read_bytes().rpartition(b"\n")[0].splitlines(), start=1):
        try:
            record = json.loads(line)
            if number > 1:
                found[record["index"]] = record
        except (ValueError, KeyError, TypeError):
            raise KvqError(f"{path}, line {number} is damaged: delete the file to evaluate again") from None
    return found


class SampleLog:
    """A JSONL file: the key in its first line, then one record for each finished sample.

    A last line that was cut short by a kill is dropped, and its sample is evaluated again. option: what the user gives
    to choose another folder, for the KvqError where it cannot be written.
    """

    def __init__(
        self, folder: Path, name: str, key: Mapping[str, Any], fresh: bool = False, option: str = "--out"
    ) -> None:
        self.path = folder / log_file(name, key)
        self.option = option
        self.records: dict[int, dict] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if fresh or not self._read():
                self.path.write_text(json.dumps({"key": key}, default=str) + "\n", encoding="utf-8")
        except OSError as error:
            raise cannot_write(self.path, error, self.option) from error

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Keep finished samples; they are on disk when this returns."""
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
        """Take up the records of an earlier run; whether the file holds its key at least."""
        data = self.path.read_bytes() if self.path.exists() else b""
        whole, newline, rest = data.rpartition(b"\n")
        if rest:
            with open(self.path, "r+b") as file:
                file.truncate(len(whole) + len(newline))
        self.records = read_records(self.path) if whole else {}
        return bool(whole)

"""Sample logs: one JSONL line per finished sample, shared by runs that resume it and by runs at the same time.

The first line holds the key. A line `{"fresh": n}` discards the records of the first n samples above it. Lines are only
ever appended, each batch by one write.

Each line below the first ends with `"sha256"`, the `digest` of its other entries. A damaged line does not count: its
sample is evaluated again. The first line says `"hashed": true`; logs of earlier versions do not, and in these a line
without a hash counts, too.

A process claims the samples that it evaluates by locks on bytes of the file far behind its end. The kernel releases the
locks of a process that ends, however it ends: no claim outlives its process.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import operator
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from kvq_cli.errors import KvqError
from kvq_cli.evaluation.base import Record
from kvq_cli.files import MAX_RESULT, cannot_write, load_json, read_bytes

FRESH, HASH, HASHED = "fresh", "sha256", "hashed"
_CLAIMS = 1 << 40
"""Offset of the byte whose lock claims sample 0; the byte before it is locked while lines are written."""


def digest(key: Mapping[str, Any]) -> str:
    """The first 10 hex digits of the SHA-256 of a key: everything that a sample's result depends on."""
    return hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()[:10]


def _hashed_line(row: Mapping[str, Any]) -> str:
    read = json.loads(json.dumps(row))  # as a reader will see it: keys are text
    return json.dumps({**read, HASH: digest(read)}, ensure_ascii=False)


def log_name(evaluation: str, key: Mapping[str, Any]) -> str:
    """File name of a sample log; the key's digest keeps runs with other settings in other files."""
    return f"{evaluation}-{digest(key)}.jsonl"


def read_records(path: Path, count: int = 0) -> dict[int, Record]:
    """Read a log's records by sample index.

    An incomplete last line and damaged lines are ignored. If a sample was written twice, the later record counts.
    KvqError if one of the first `count` samples is missing, and a damaged line may have held it.
    """
    content = _Content()
    content.read(read_bytes(path, MAX_RESULT).rpartition(b"\n")[0].splitlines())
    if content.damaged and not all(index in content.records for index in range(count)):
        raise KvqError(f"{path}, line {content.damaged[0]} is damaged: run the evaluation again")
    return content.records


class _Content:
    """What the lines of a log say: records by sample index, and the numbers of damaged lines.

    required: fields without which a record does not count.
    """

    def __init__(self, required: Collection[str] = ()) -> None:
        self.records: dict[int, Record] = {}
        self.damaged: list[int] = []
        self.lines = 0
        self._hashed, self._required = True, required

    def read(self, lines: Iterable[bytes]) -> None:
        """Read the next lines; the first of all holds the key."""
        for line in lines:
            self.lines += 1
            try:
                row = load_json(line)
                if self.lines == 1:
                    self._hashed = HASHED in row
                elif (HASH in row or self._hashed) and row.pop(HASH) != digest(row):
                    self.damaged.append(self.lines)
                else:
                    self._add(row)
            except (ValueError, LookupError, TypeError, AttributeError):
                self.damaged.append(self.lines)

    def _add(self, row: Record) -> None:
        if FRESH in row:
            for index in [index for index in self.records if index < row[FRESH]]:
                del self.records[index]
        elif all(name in row for name in self._required):
            self.records[operator.index(row["index"])] = row


class SampleLog:
    """A log that this process reads, appends to, and claims samples of. Claims need the log open (`with log:`).

    An incomplete last line, left by a killed process, is removed and its sample evaluated again. damaged: numbers of
    damaged lines. fresh: discard the records of that many samples. option: the flag that an error about an unwritable
    folder names. required: fields without which a record does not count, so that its sample is evaluated again.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        key: Mapping[str, Any],
        fresh: int = 0,
        option: str = "--out",
        required: Collection[str] = (),
    ) -> None:
        self.path = folder / log_name(name, key)
        self.option = option
        self._content = _Content(required)
        self.records, self.damaged = self._content.records, self._content.damaged
        # One descriptor for everything: closing any other one of the file would release this process's locks.
        self._file: int | None = None
        self._offset = 0  # of the complete lines read so far
        with self._write_errors():
            folder.mkdir(parents=True, exist_ok=True)
        with self, self._writing():
            if not self._content.lines:
                self._write(json.dumps({"key": key, HASHED: True}, default=str))
            if any(index < fresh for index in self.records):
                self._write(_hashed_line({FRESH: fresh}))

    def __enter__(self) -> SampleLog:
        if self._file is None:
            with self._write_errors():
                self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def append(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append the records of finished samples. They outlive this process, not a power cut."""
        lines = [_hashed_line(record) for record in records]
        with nullcontext() if self._file is not None else self, self._writing():
            self._write(*lines)

    def claim(self, indices: Sequence[int]) -> list[int]:
        """Claim samples for this process; returns those that are to be evaluated.

        Empty if all are finished, or if another process has claimed any sample between the first and the last.
        """
        try:
            self._lock(fcntl.LOCK_EX | fcntl.LOCK_NB, _CLAIMS + min(indices), max(indices) - min(indices) + 1)
        except (BlockingIOError, PermissionError):
            return []
        self.refresh()  # another process may have finished them since
        missing = [index for index in indices if index not in self.records]
        for index in indices:
            if not missing or not missing[0] <= index <= missing[-1]:
                self.release([index])
        return missing

    def release(self, indices: Sequence[int]) -> None:
        """Release the claim on samples."""
        self._lock(fcntl.LOCK_UN, _CLAIMS + min(indices), max(indices) - min(indices) + 1)

    def refresh(self) -> bool:
        """Read the lines that any process has appended since the last call; returns whether an incomplete one follows
        them."""
        size = os.fstat(self._descriptor).st_size
        if size < self._offset:  # made anew by someone
            self._offset = self._content.lines = 0
        data = os.pread(self._descriptor, size - self._offset, self._offset)
        complete = data[: data.rfind(b"\n") + 1]
        self._content.read(complete.splitlines())
        self._offset += len(complete)
        return len(complete) < len(data)

    @property
    def _descriptor(self) -> int:
        if self._file is None:
            raise ValueError(f"{self.path} is not open")
        return self._file

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Lock the end of the file, without an incomplete line: whoever wrote it has been killed."""
        with self._write_errors():
            self._lock(fcntl.LOCK_EX, _CLAIMS - 1, 1)
            try:
                if self.refresh():  # else never: without locks, another run may have appended lines since
                    os.ftruncate(self._descriptor, self._offset)
                yield
                self.refresh()
            finally:
                self._lock(fcntl.LOCK_UN, _CLAIMS - 1, 1)

    def _write(self, *lines: str) -> None:
        data = "".join(line + "\n" for line in lines).encode(errors="backslashreplace")
        while data:
            data = data[os.write(self._descriptor, data) :]

    def _lock(self, command: int, start: int, length: int) -> None:
        try:
            fcntl.lockf(self._descriptor, command, length, start)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise
            # A file system without locks: two runs at once may evaluate a sample twice, the later record counts.

    @contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Raise KvqError for a failed write inside the block."""
        try:
            yield
        except OSError as error:
            raise cannot_write(self.path, error, self.option) from error

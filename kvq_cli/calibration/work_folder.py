"""The folder in which a calibration keeps what it has done, so that it can be interrupted and resumed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from kvq_cli.artifact.format import write_synced
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.files import cannot_write


class WorkFolder:
    """`<out>.work` beside the output: what is asked for, the captured numbers, and the finished parts.

    Every file is either complete or not there, except the captured numbers: of these, `captured` says how far they go.
    One process at a time has the folder, from `open` or `clear` until `remove` or `close`.
    """

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(out.name + ".work")
        self._made: list[Path] = []  # folders above it that were not there
        self._lock: int | None = None  # the folder, open and locked

    def open(self, request: Mapping, *, resume: bool, room: int) -> None:
        """Start anew, or go on where an earlier run with the same `request` stopped.

        room: bytes that the run will write. Raises UsageError when unfinished work is there and `resume` is off, or
        when it was another request's; KvqError when the folder cannot be written or the disk has no room.
        """
        if not self.path.exists():
            self._create(request, room)
            return
        if not resume:
            raise UsageError(
                f"{self.path} holds an unfinished calibration: go on with --resume, or start over with --force"
            )
        self._take()
        if (before := self.read_json("request")) is None:
            self.write_json("request", request)
        elif different := [key for key in request if before.get(key) != request[key]]:
            raise UsageError(
                f"{self.path} was begun with another {', '.join(different)}: "
                f"repeat those options, or start over with --force"
            )

    def clear(self) -> None:
        """Remove what an earlier run left; KvqError where that is still running."""
        if self.path.exists():
            self._take()
            self.remove()

    def remove(self) -> None:
        """Leave nothing, unless something else has come to lie in the folders that were made for it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()
        for folder in self._made:
            with suppress(OSError):
                folder.rmdir()

    def close(self) -> None:
        """Let go of the folder, whatever is in it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write_json(self, name: str, value: Mapping) -> None:
        self._replace(f"{name}.json", json.dumps(value).encode())

    def read_json(self, name: str) -> dict | None:
        """What `write_json` wrote, or None."""
        try:
            return json.loads((self.path / f"{name}.json").read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise KvqError(f"cannot read {self.path / name}.json ({error}): start over with --force") from error

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        self._replace(f"{name}.safetensors", safetensors.torch.save({k: v.contiguous() for k, v in tensors.items()}))

    def read_tensors(self, name: str) -> dict[str, Tensor] | None:
        """What `write_tensors` wrote, or None."""
        try:
            return safetensors.torch.load((self.path / f"{name}.safetensors").read_bytes())
        except FileNotFoundError:
            return None

    def write_numbers(self, name: str, index: int, numbers: Tensor) -> None:
        """Put one sample's captured numbers (bfloat16, contiguous, the same count each time) at place `index`."""
        data = numbers.view(torch.uint8).numpy()
        path = self.path / f"{name}.bf16"
        with _writing(self.path):
            path.touch()  # samples come in any order
        with _writing(self.path), open(path, "r+b") as file:
            file.seek(index * data.nbytes)
            file.write(data)

    def read_numbers(self, name: str, shape: tuple[int, ...], start: int = 0) -> Tensor:
        """Captured numbers of the samples `start`, ..., `start + shape[0] - 1`: bfloat16 of `shape`."""
        size = torch.Size(shape).numel()
        numbers = torch.empty(shape, dtype=torch.bfloat16)
        with open(self.path / f"{name}.bf16", "rb") as file:
            file.seek(2 * start * (size // shape[0]))
            if file.readinto(numbers.view(torch.uint8).numpy()) != 2 * size:
                raise KvqError(f"{self.path / name}.bf16 is shorter than it was written: start over with --force")
        return numbers

    def _create(self, request: Mapping, room: int) -> None:
        self._made = [folder for folder in self.path.parents if not folder.exists()]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path.parent).free
            if free < room:
                self.remove()
                raise KvqError(
                    f"no space left in {self.path.parent}: {room / 1e9:.1f} GB are needed while calibrating and "
                    f"{free / 1e9:.1f} GB are free: lower --budget, or choose another --out"
                )
            self.path.mkdir()
        except OSError as error:
            raise cannot_write(self.path, error) from error
        self._take()
        self.write_json("request", request)

    def _take(self) -> None:
        """Lock the folder until `remove` or `close`. Two that write the same files mix their numbers."""
        in_use = KvqError(f"{self.path} is in use by another calibration: wait for its end, or choose another --out")
        try:
            self._lock = os.open(self.path, os.O_RDONLY)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = os.fstat(self._lock).st_ino == self.path.stat().st_ino  # not removed and made again meanwhile
        except (BlockingIOError, FileNotFoundError):
            raise in_use from None
        except OSError:  # a file system without locks
            return
        if not taken:
            raise in_use

    def _replace(self, name: str, data: bytes) -> None:
        with _writing(self.path):
            write_synced(self.path / f"{name}.new", data)
            os.replace(self.path / f"{name}.new", self.path / name)


class _writing:
    """Turn a failed write into its one line."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error, trace) -> None:
        if isinstance(error, OSError):
            raise cannot_write(self.path, error) from error

"""Folders that hold the finished steps of a calibration, so that it can be interrupted and resumed."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from kvq_cli.artifact.format import write_synced
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.files import cannot_write, load_json
from kvq_cli.units import human_bytes

#: Seconds between two tries to open a folder that another process captures to.
_RETRY = 0.5


class WorkFolder:
    """The request, the captured activations, and the finished tensors of a calibration.

    Files are complete or absent, except the captured activations: `captured.json` counts the samples that are complete.
    One process at a time holds the lock, from `open` or `clear` until `remove` or `close`, unless the folder is shared.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._created: list[Path] = []  # parent folders that did not exist before
        self._shared = False
        self._lock: int | None = None  # file descriptor of the folder, open and locked

    def open(
        self,
        request: Mapping[str, Any],
        *,
        resume: bool,
        disk_bytes: int,
        shared: bool = False,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Start a calibration, or resume an interrupted one with the same `request`.

        disk_bytes: bytes that the run will write. shared: several processes may have it open, once they `share` it;
        until then, this one waits for the other, and tells `note` so.
        Raises UsageError where unfinished work exists and `resume` is off or the request differs; KvqError where
        another process calibrates there, the folder cannot be written or the disk has no space.
        """
        self._shared = shared
        new = not self.path.exists()
        if new:
            self._create(disk_bytes)
        self._check_own()
        self._acquire_lock(note)
        if not new and not resume:
            self.close()
            raise UsageError(
                f"{self.path} holds an unfinished calibration: continue it with --resume, or start over with --force"
            )
        if (before := self.read_json("request")) is None:
            self.write_json("request", request)
        elif different := [key for key in request if before.get(key) != request[key]]:
            upgraded = any(key.startswith("version of ") for key in different)
            why = "; steps of another version are not continued, since their numbers may differ" if upgraded else ""
            raise UsageError(
                f"{self.path} was begun with another {', '.join(different)}: "
                f"repeat those options, or start over with --force{why}"
            )

    def clear(self) -> None:
        """Remove the folder of an earlier run; KvqError where that run is still active."""
        if self.path.exists():
            self._check_own()
            self._acquire_lock()
            self.remove()

    def _check_own(self) -> None:
        """UsageError where the folder holds files, but no request, which a calibration writes first."""
        held = {path.name for path in self.path.iterdir()} if self.path.is_dir() else set()
        if held and not held & {"request.json", "request.json.new"}:
            raise UsageError(f"{self.path} holds {min(held)!r}, and no calibration: move it, or choose another --out")

    def remove(self) -> None:
        """Remove the folder, its request last, and the parent folders created for it that are empty."""
        for path in self.path.glob("*"):
            if path.name != "request.json":  # a folder without it is not taken for a calibration's
                with suppress(OSError):
                    path.unlink()
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()
        for folder in self._created:
            with suppress(OSError):
                folder.rmdir()

    def share(self) -> None:
        """Let other processes open the folder, if it was opened as shared: this one writes no more to it."""
        if self._shared and self._lock is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(self._lock, fcntl.LOCK_SH)

    def close(self) -> None:
        """Release the lock; files stay."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write `<name>.json` atomically."""
        self._replace(f"{name}.json", json.dumps(value).encode())

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The contents of `<name>.json`; None where it was not written."""
        try:
            return load_json((self.path / f"{name}.json").read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise KvqError(f"cannot read {self.path / name}.json ({error}): {self._start_over}") from error

    def write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Write `<name>.safetensors` atomically."""
        self._replace(f"{name}.safetensors", safetensors.torch.save({k: v.contiguous() for k, v in tensors.items()}))

    def read_tensors(self, name: str) -> dict[str, Tensor]:
        """The contents of `<name>.safetensors`; KvqError where it cannot be read."""
        path = self.path / f"{name}.safetensors"
        try:
            return safetensors.torch.load(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise KvqError(f"cannot read {path} ({error}): {self._start_over}") from error

    def has_tensors(self, name: str) -> bool:
        """Whether `<name>.safetensors` was written."""
        return (self.path / f"{name}.safetensors").exists()

    def write_sample(self, name: str, index: int, numbers: Tensor) -> None:
        """Write sample `index` to `<name>.bf16`: bfloat16, contiguous, the same number of elements for every sample."""
        data = numbers.view(torch.uint8).numpy().data
        path = self.path / f"{name}.bf16"
        with _write_errors(self.path):
            path.touch()  # samples arrive in any order
        with _write_errors(self.path), open(path, "r+b") as file:
            file.seek(index * data.nbytes)
            file.write(data)

    def count_samples(self, done: int) -> None:
        """Write `captured.json`: samples 0 to `done` - 1 are complete, on the disk too, before it says so."""
        with _write_errors(self.path):
            for path in self.path.glob("*.bf16"):
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        self.write_json("captured", {"samples": done})

    def read_samples(self, name: str, shape: tuple[int, ...], start: int = 0) -> Tensor:
        """Samples `start` to `start + shape[0] - 1` of `<name>.bf16`, bfloat16 of `shape`."""
        size = torch.Size(shape).numel()
        numbers = torch.empty(shape, dtype=torch.bfloat16)
        path = self.path / f"{name}.bf16"
        try:
            with open(path, "rb") as file:
                file.seek(2 * start * (size // shape[0]))
                if file.readinto(numbers.view(torch.uint8).numpy().data) != 2 * size:
                    raise KvqError(f"{path} is shorter than it was written: {self._start_over}")
        except OSError as error:
            raise KvqError(f"cannot read {path} ({error}): {self._start_over}") from error
        return numbers

    @property
    def _start_over(self) -> str:
        """What removes the folder: `--force` does not clear captured activations that others share."""
        return f"delete {self.path}" if self._shared else "start over with --force"

    def _create(self, disk_bytes: int) -> None:
        self._created = [folder for folder in self.path.parents if not folder.exists()]
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.path.parent).free
            if free < disk_bytes:
                self.remove()
                raise KvqError(
                    f"no space left in {self.path.parent}: {human_bytes(disk_bytes)} are needed while "
                    f"calibrating and {human_bytes(free)} are free: lower --disk, or choose another --out"
                )
            self.path.mkdir(exist_ok=self._shared)
        except OSError as error:
            raise cannot_write(self.path, error) from error

    def _acquire_lock(self, note: Callable[[str], None] = lambda _: None) -> None:
        """Lock the folder until `remove` or `close`: two processes writing the same files would mix their numbers."""
        waits = False
        while not self._try_lock():
            if not self._shared:
                raise KvqError(
                    f"{self.path} is in use by a running calibration: wait for its end, or choose another --out"
                )
            if not waits:
                note(f"waiting for another calibration, which captures the same activations ({self.path})")
            waits = True
            time.sleep(_RETRY)

    def _try_lock(self) -> bool:
        """Lock the folder unless another process has locked it; of a shared one, share the lock with others."""
        try:
            self._lock = os.open(self.path, os.O_RDONLY)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not self._shared:
                    raise
                fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            acquired = os.fstat(self._lock).st_ino == self.path.stat().st_ino  # not removed and created anew meanwhile
        except FileNotFoundError as error:
            raise KvqError(f"{self.path} was removed by another process: start again") from error
        except BlockingIOError:
            acquired = False
        except OSError:  # a file system without locks
            return True
        if not acquired:
            self.close()
        return acquired

    def _replace(self, name: str, data: bytes) -> None:
        with _write_errors(self.path):
            write_synced(self.path / f"{name}.new", data)
            os.replace(self.path / f"{name}.new", self.path / name)


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Raise KvqError for a failed write inside the block."""
    try:
        yield
    except OSError as error:
        raise cannot_write(path, error) from error

"""Blocks as files in a folder: atomic, checked, least recently used first out."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load, save
from torch import Tensor

from kvq_cli.errors import KvqError, reading
from kvq_cli.files import cannot_write, read_bytes, remove_partial, replacing

#: The format of the files, part of every fingerprint.
FORMAT = 1
_SUFFIX, _PARTIAL = ".safetensors", ".partial"
#: Paths of blocks, and of partial files of theirs, in the folder, which may have other files.
_OURS = re.compile(r"[0-9a-f]{32}/[0-9a-f]{2}/\.?[0-9a-f]+\.safetensors(\..+\.partial)?")
#: Room for the header of a file, without the fingerprint.
_HEADER = 4096
#: The share of the capacity that is freed at once; seconds after which a partial file of another machine is removed.
_FREED, _ABANDONED = 1 / 16, 3600


class PrefixStore:
    """Files `FINGERPRINT/ab/HASH.safetensors`, of one uint8 tensor `block` each, with their own checksum.

    Any number of processes may read, write and evict in the folder; what one of them does not find, or finds damaged,
    it does not have. Times of files order their use, so that machines' clocks should agree to seconds.

    folder:      of all fingerprints. fingerprint: of what makes blocks interchangeable; others' are never read.
    capacity:    bytes of all files in the folder; one process that writes never exceeds it, several by up to 1/16 each.
                 None: no limit.
    """

    def __init__(self, folder: Path, fingerprint: str, capacity: int | None = None) -> None:
        self.folder, self.fingerprint, self.capacity = folder, fingerprint, capacity
        self._own = folder / hashlib.sha256(fingerprint.encode()).hexdigest()[:32]
        self._used: int | None = None  # bytes of the folder as last counted, with those written since
        self._since = 0

    def path(self, key: bytes) -> Path:
        """Return the file of the block with this hash."""
        name = key.hex()
        return self._own / name[-2:] / f"{name}{_SUFFIX}"

    def __contains__(self, key: bytes) -> bool:
        """Return whether there is a file, which may be damaged."""
        return os.path.isfile(self.path(key))  # False also where a disk does not answer

    def load(self, key: bytes, nbytes: int) -> Tensor | None:
        """Read a block, uint8 `[nbytes]`. None: there is none, or its file was damaged or foreign, and is removed."""
        path = self.path(key)
        try:
            with reading(path):
                data = read_bytes(path, nbytes + _HEADER + 8 * len(self.fingerprint))
                size = int.from_bytes(data[:8], "little")
                found = json.loads(data[8 : 8 + size])["__metadata__"]
                block = load(data)["block"]
                if block.dtype != torch.uint8 or block.shape != (nbytes,) or found != self._metadata(key, block):
                    raise KvqError(f"{path}: altered")
        except KvqError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno == errno.EFBIG:  # else the disk's fault, not the file's
                with suppress(OSError):
                    path.unlink()
            return None
        return block

    def save(self, key: bytes, block: Tensor) -> None:
        """Write a block, uint8 on the CPU, and make room for it. Raises KvqError where it cannot be written."""
        path, data = self.path(key), save({"block": block}, self._metadata(key, block))
        if self.capacity is not None:
            if len(data) > self.capacity:
                raise KvqError(f"a block has {len(data):,} bytes: give a larger --prefix-store-size")
            if self._used is None or self._used + len(data) > self.capacity or self._since > self.capacity * _FREED:
                self.evict(len(data))
            self._used, self._since = (self._used or 0) + len(data), self._since + len(data)
        with replacing(path, "--prefix-store") as partial:
            partial.write_bytes(data)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Say that the blocks of a prefix, in their order, were used now: later blocks leave the store before earlier
        ones, without which they are of no use."""
        now = time.time_ns()
        for index, key in enumerate(keys):
            with suppress(OSError):
                os.utime(self.path(key), ns=(now - index, now - index))

    def evict(self, room: int = 0) -> None:
        """Count the folder's bytes, remove what killed writers left, and least recently used files if there is no
        `room`, bytes, for others."""
        files = sorted(self._files(), key=lambda file: file.used)
        total = sum(file.nbytes for file in files)
        if self.capacity is not None and total + room > self.capacity:
            for file in files:
                if total + room <= self.capacity * (1 - _FREED):
                    break
                with suppress(OSError):
                    file.path.unlink()
                total -= file.nbytes
        self._used, self._since = total, 0

    def check_writable(self) -> None:
        """Raise KvqError unless the folder exists or can be made, and files can be written in it."""
        try:
            self._own.mkdir(parents=True, exist_ok=True)
            with replacing(self._own / "probe", "--prefix-store") as partial:
                partial.write_bytes(b"")
            (self._own / "probe").unlink(missing_ok=True)
        except OSError as error:
            raise cannot_write(self.folder, error, "--prefix-store") from None

    def _metadata(self, key: bytes, block: Tensor) -> dict[str, str]:
        about = {"format": f"kvq prefix block {FORMAT}", "fingerprint": self.fingerprint, "block": key.hex()}
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode())
        digest.update(block.numpy().data)
        return about | {"sha256": digest.hexdigest()}

    def _files(self) -> Iterator[_File]:
        """Yield all blocks of all fingerprints. Removes partial files whose writers ended."""
        for parent, _, names in os.walk(self.folder):
            for name in names:
                path = Path(parent, name)
                if not _OURS.fullmatch(path.relative_to(self.folder).as_posix()):
                    continue
                with suppress(OSError):
                    if name.endswith(_PARTIAL):
                        remove_partial(path.with_name(name[1:].partition(_SUFFIX)[0] + _SUFFIX))
                        if path.stat().st_mtime < time.time() - _ABANDONED:
                            path.unlink()
                    elif name.endswith(_SUFFIX):
                        found = path.stat()
                        yield _File(found.st_mtime_ns, found.st_size, path)


@dataclass(frozen=True)
class _File:
    """used: when, in nanoseconds."""

    used: int
    nbytes: int
    path: Path

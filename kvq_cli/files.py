"""Write files atomically, and report write errors in one line."""

from __future__ import annotations

import errno
import glob
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from kvq_cli.errors import KvqError


def write_json(path: Path, document: Any, option: str = "--out") -> None:
    """Write a JSON file atomically; see `write_text`."""
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False, default=str) + "\n", option)


def write_text(path: Path, text: str, option: str = "--out") -> None:
    """Write a text file atomically, creating its folder.

    option: the flag that chooses another path, named by the KvqError where the file cannot be written.
    """
    with replacing(path, option) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def replacing(path: Path, option: str = "--out") -> Iterator[Path]:
    """The path of a file beside `path` that replaces it when the block succeeds; creates the folder.

    option: the flag that chooses another path, named by the KvqError where the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")  # two processes may write the same file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_partial(path)
        yield partial
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise cannot_write(path, error, option) from error


def _remove_partial(path: Path) -> None:
    """Remove partial files left by processes that were killed while writing the same file."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        process = leftover.name.removesuffix(".partial").rpartition(".")[2]
        if process.isdecimal() and not _runs(int(process)):
            with suppress(OSError):
                leftover.unlink()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)  # signal 0 only checks that the process exists
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # a process of another user
        return True
    return True


def check_writable(folder: Path, option: str = "--out") -> None:
    """Raise KvqError if files cannot be created in `folder`, before a long run; leaves no file."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise cannot_write(folder, error, option) from None


def cannot_write(path: Path, error: OSError, option: str = "--out") -> KvqError:
    """The KvqError for a failed write: a full disk, a read-only folder. option: the flag that chooses another path."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return KvqError(f"no space left to write {path} ({error.strerror}): free some, or choose another {option}")
    return KvqError(f"cannot write {path}: {error.strerror or error}; choose another {option}")

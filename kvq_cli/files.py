"""Files that are whole or not there at all, and the one line that says why one cannot be written."""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from kvq_cli.errors import KvqError


def write_json(path: Path, document: Any) -> None:
    """Write a JSON file whole or not at all."""
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False, default=str) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, and its folder where there is none."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")  # two processes may write the same file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise cannot_write(path, error) from error


def check_writable(folder: Path) -> None:
    """Raise KvqError now, not after an hour, when `folder` is no place to write to; leaves nothing there."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    try:
        with TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise cannot_write(folder, error) from None


def cannot_write(path: Path, error: OSError) -> KvqError:
    """The one line for a full disk, a read-only folder and the like."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return KvqError(f"no space left to write {path} ({error.strerror}): free some, or choose another --out")
    return KvqError(f"cannot write {path}: {error.strerror or error}; choose another --out")

"""Write files atomically, and report write errors in one line."""

from __future__ import annotations

import errno
import glob
import json
import math
import os
import platform
import re
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from kvq_cli.errors import KvqError, UsageError

#: Most bytes of a file that is read whole: of settings, of a prompt or a conversation (a million tokens have below
#: 10 MiB), of a result or of questions, and of a dataset.
MAX_SETTINGS, MAX_TEXT, MAX_RESULT, MAX_DATASET = 1 << 20, 64 << 20, 1 << 30, 64 << 30


def json_text(document: Any, *, ascii_only: bool) -> str:
    """The document as JSON. Infinity and NaN, which JSON does not have, become null."""
    return json.dumps(_finite(document), indent=2, ensure_ascii=ascii_only, allow_nan=False, default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def load_json(text: str | bytes) -> Any:
    """The value of a JSON text; ValueError for anything else, also for deep nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def write_json(path: Path, document: Any, option: str = "--out") -> None:
    """Write a JSON file atomically; see `json_text` and `write_text`."""
    write_text(path, json_text(document, ascii_only=False) + "\n", option)


def write_text(path: Path, text: str, option: str = "--out") -> None:
    """Write a text file atomically, creating its folder.

    option: the flag that chooses another path, named by the KvqError where the file cannot be written.
    """
    with replacing(path, option) as partial:
        # Names of files that are not UTF-8 contain lone surrogates: they must not lose a result at the end of a run.
        partial.write_text(text, encoding="utf-8", errors="backslashreplace")


@contextmanager
def replacing(path: Path, option: str = "--out") -> Iterator[Path]:
    """The path of a file beside `path` that replaces it when the block succeeds, and is removed when it fails; creates
    the folder.

    option: the flag that chooses another path, named by the KvqError where the file cannot be written.
    """
    if not path.name:  # . or /
        raise UsageError(f"{path} is a folder; give the name of a file as {option}")
    partial = partial_path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_partial(path)
        yield partial
        os.replace(partial, path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError):
            raise cannot_write(path, error, option) from error
        raise


def partial_path(path: Path) -> Path:
    """Where this process writes a file or folder until it is complete; others may write to the same path, too."""
    return path.with_name(f"{_partial_prefix(path)}{os.getpid()}.partial")


def _partial_prefix(path: Path) -> str:
    """How the names of this machine's partial files of `path` begin; a process id and `.partial` follow."""
    return f".{path.name}.{re.sub(r'[^A-Za-z0-9-]', '-', platform.node())}."


def remove_partial(path: Path) -> None:
    """Remove what processes of this machine left that were killed while writing the same file or folder."""
    prefix = _partial_prefix(path)
    for leftover in path.parent.glob(f"{glob.escape(prefix)}*.partial"):
        process = leftover.name.removeprefix(prefix).removesuffix(".partial")
        if process.isdecimal() and not _runs(int(process)):
            with suppress(OSError):
                shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)  # signal 0 only checks that the process exists
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # a process of another user
        return True
    return True


def file_size(path: Path, at_most: int | None = None) -> int:
    """Bytes of a file that is read whole. Raises OSError for a pipe or a device, which might never end, and for a file
    of more than `at_most` bytes."""
    found = path.stat()
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "Not a regular file", str(path))
    if at_most is not None and found.st_size > at_most:
        raise OSError(errno.EFBIG, f"has {found.st_size:,} bytes, above the limit of {at_most:,}", str(path))
    return found.st_size


def read_bytes(path: Path, at_most: int) -> bytes:
    """The content of a file. Raises OSError where it cannot be read, also as `file_size` does."""
    file_size(path, at_most)
    return path.read_bytes()


def read_text(path: Path, at_most: int = MAX_RESULT) -> str:
    """The content of a UTF-8 text file, with line breaks as `\\n`. Raises OSError as `read_bytes`, and
    UnicodeDecodeError."""
    file_size(path, at_most)
    return path.read_text(encoding="utf-8")


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


def os_error(error: Exception) -> OSError:
    """The system's error behind one of safetensors."""
    number = re.search(r"os error (\d+)", str(error))
    return OSError(int(number[1]), os.strerror(int(number[1]))) if number else OSError(str(error))

"""What is said about an error: one line that a terminal can show, and the exit code."""

from __future__ import annotations

import re

import typer

from kvq_cli.errors import KvqError

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def escaped(text: str) -> str:
    """`text` with control characters and lone surrogates as Python writes them (`\\x1b`); line breaks are kept.

    Text of files, which may come from anyone, must not write to a terminal's clipboard or move its cursor.
    """
    return _CONTROL.sub(lambda one: one[0] if one[0] == "\n" else one[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """`text` as a single line without control characters."""
    return escaped(" ".join(text.split()))


def explain(error: Exception) -> tuple[str, int]:
    """Message and exit code of an error."""
    if isinstance(error, KvqError):
        return str(error), error.exit_code
    if hasattr(error, "format_message"):  # typer's own errors: unknown flag, missing argument, bad value
        return error.format_message(), getattr(error, "exit_code", 2)
    if isinstance(error, typer.Abort):
        return "input ended before an answer was given", 1
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}", 1
    if is_out_of_memory(error):
        return "out of memory: use a shorter context, a smaller batch, fewer bits or --prefill-chunk", 1
    return f"{type(error).__name__}: {error} (KVQ_DEBUG=1 shows the traceback)", 1


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory ran out, of the GPU or of the machine. On a CPU, PyTorch's allocator raises a RuntimeError."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or ("allocate memory" in str(error))
    )

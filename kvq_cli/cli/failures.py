"""What is said about an error: one line that a terminal can show, and the exit code."""

from __future__ import annotations

import re

import typer

from kvq_cli.errors import KvqError, is_out_of_memory

#: No command has all of these options.
_LESS_MEMORY = (
    "shorten the context or --seqlen, lower --batch-size or, in generate and chat, set --prefill-chunk; "
    "`kvq plan` computes which context fits"
)
#: Characters of a message, or of a line of a note; all of kvq's own are shorter.
MAX_MESSAGE = 1500
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


def escaped(text: str) -> str:
    """`text` with control characters and lone surrogates as Python writes them (`\\x1b`); line breaks are kept.

    Text of files, which may come from anyone, must not write to a terminal's clipboard or move its cursor.
    """
    return _CONTROL.sub(lambda one: one[0] if one[0] == "\n" else one[0].encode("unicode_escape").decode(), text)


def one_line(text: str) -> str:
    """`text` as a single line without control characters, `shortened`."""
    return escaped(shortened(" ".join(text.split())))


def shortened(text: str) -> str:
    """`text` without its middle if it is long: a message may repeat a value of any length, and says what to do last."""
    if len(text) <= MAX_MESSAGE:
        return text
    kept = MAX_MESSAGE // 2
    return f"{text[:kept]} [... {len(text) - 2 * kept:,} characters ...] {text[-kept:]}"


def explain(error: BaseException) -> tuple[str, int]:
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
        return f"out of memory: {_LESS_MEMORY}", 1
    return f"{type(error).__name__}: {error} (KVQ_DEBUG=1 shows the traceback)", 1

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
_CONTROL = r"\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff"
_IN_ANSWERS = re.compile(f"[{_CONTROL}]")
#: Tabs, line separators, and characters that change the direction of the text around them.
_IN_NAMES = re.compile(f"[{_CONTROL}\t\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def escaped(text: str, characters: re.Pattern[str] = _IN_NAMES) -> str:
    """`text` with control characters, lone surrogates and changes of direction as Python writes them (`\\x1b`); line
    breaks are kept.

    Text of files, which may come from anyone, must not write to a terminal's clipboard, move its cursor, or show a name
    as another one.
    """
    return characters.sub(lambda one: one[0].encode("unicode_escape").decode(), text)


def escaped_answer(text: str) -> str:
    """A piece of a model's answer for a terminal: as `escaped`, with tabs, and marks of direction, which languages that
    are written from right to left need."""
    return escaped(text, _IN_ANSWERS)


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

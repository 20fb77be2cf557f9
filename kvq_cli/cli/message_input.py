'''Read the messages and commands of `kvq chat`, typed at a terminal or piped in, of one or several lines.

A line that ends in a backslash goes on in the next one. A block between `"""` and `"""` is one message, even if
it begins with a slash.
'''

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvq_cli.cli.interrupts import Interrupts

QUOTES = '"""'


@dataclass(frozen=True)
class Message:
    """What was entered; is_command: it is a command and its argument."""

    text: str
    is_command: bool


def messages(interrupts: Interrupts, note: Callable[[str], None]) -> Iterator[Message]:
    """What is entered, up to the end of the input or the second Ctrl-C in a row; empty lines are left out."""
    at_terminal = sys.stdin.isatty()
    read = _typed() if at_terminal else _piped
    while not interrupts.leaves:
        try:
            message = _message(read())
        except EOFError:
            break
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            interrupts.count += 1
            if not interrupts.leaves:
                note("Ctrl-C again or Ctrl-D quits")
            continue
        interrupts.count = 0
        if message.text.strip():
            yield message


def _message(entered: str) -> Message:
    entered = entered.removeprefix("\ufeff")  # a file's byte order mark
    if entered.lstrip().startswith(QUOTES):
        return Message(entered.strip().removeprefix(QUOTES).removesuffix(QUOTES).strip("\n"), False)
    return Message(entered, entered.lstrip().startswith("/"))


def _unfinished(entered: str) -> str | None:
    """What the next line is appended to; None: the message is complete."""
    if entered.lstrip().startswith(QUOTES):
        return None if entered.strip().removeprefix(QUOTES).endswith(QUOTES) else entered + "\n"
    return entered.removesuffix("\\") + "\n" if entered.endswith("\\") else None


def _piped() -> str:
    """A message from a file or a pipe, whose end ends the message, too."""
    begun: str | None = ""
    for line in iter(sys.stdin.readline, ""):
        entered = begun + line.removesuffix("\n")
        begun = _unfinished(entered)
        if begun is None:
            return entered
    if not begun:
        raise EOFError
    return begun.removesuffix("\n")


def _typed() -> Callable[[], str]:
    """Reads messages typed at a terminal, with those of earlier conversations for the arrow keys."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.document import Document
    from prompt_toolkit.key_binding import KeyBindings
    from prompt_toolkit.output import create_output

    from kvq_cli.cli.line_history import chat_history

    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: Any) -> None:
        buffer = event.current_buffer
        if (unfinished := _unfinished(buffer.text)) is None:
            buffer.validate_and_handle()
        elif buffer.document.is_cursor_at_the_end:
            buffer.document = Document(unfinished)
        else:
            buffer.newline(copy_margin=False)

    return PromptSession[str](
        "> ",
        multiline=True,
        prompt_continuation=lambda _width, _line, wraps: "" if wraps else "... ",
        history=chat_history(),
        key_bindings=keys,
        enable_suspend=True,
        output=None if sys.stdout.isatty() else create_output(sys.stderr),  # answers go to a file
    ).prompt

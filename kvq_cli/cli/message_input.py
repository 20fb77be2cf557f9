'''Read the messages and commands of `kvq chat`, typed at a terminal or piped in, of one or several lines.

A line that ends in a backslash goes on in the next one. A block between `"""` and `"""` is one message, even if
it begins with a slash.
'''

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvq_cli.cli.interrupts import Interrupts
from kvq_cli.cli.line_history import chat_history

PROMPT, CONTINUED = "> ", "... "
QUOTES = '"""'


@dataclass(frozen=True)
class Message:
    """What was entered; is_command: it is a command and its argument."""

    text: str
    is_command: bool


def messages(interrupts: Interrupts, note: Callable[[str], None]) -> Iterator[Message]:
    """What is entered, up to the end of the input or the second Ctrl-C in a row; empty lines are left out."""
    at_terminal = sys.stdin.isatty()
    read_line = _line_reader() if at_terminal else _piped_line
    while not interrupts.leaves:
        try:
            with interrupts.typing():
                message = read_message(read_line, keep_unfinished=not at_terminal)
        except EOFError:
            break
        except KeyboardInterrupt:
            if not at_terminal:
                raise
            if not interrupts.leaves:
                note("\nCtrl-C again or Ctrl-D quits")
            continue
        if message.text.strip():
            yield message
    if at_terminal:
        print(file=sys.stderr)


def read_message(read_line: Callable[[str], str], *, keep_unfinished: bool) -> Message:
    """Read one message or command.

    read_line: returns the next line, given the prompt to show; EOFError at the end. keep_unfinished: a message that the
    end of the input cuts is returned as it is; else EOFError.
    """
    lines = [read_line(PROMPT)]
    is_block = lines[0].lstrip().startswith(QUOTES)
    if is_block:
        lines[0] = lines[0].lstrip().removeprefix(QUOTES)
    try:
        while not lines[-1].rstrip().endswith(QUOTES) if is_block else lines[-1].endswith("\\"):
            lines[-1] = lines[-1] if is_block else lines[-1].removesuffix("\\")
            lines.append(read_line(CONTINUED))
    except EOFError:
        if not keep_unfinished:
            raise
    if is_block:
        text = "\n".join(lines).rstrip().removesuffix(QUOTES).strip("\n")
        return Message(text, False)
    return Message("\n".join(lines), lines[0].lstrip().startswith("/"))


def _line_reader() -> Callable[[str], str]:
    """Lines typed at a terminal, with line editing, and with the lines of earlier conversations."""
    history = chat_history()
    try:
        import readline
    except ImportError:
        pass
    else:
        for line in history.read():
            readline.add_history(line)

    def read_line(prompt: str) -> str:
        if sys.stdout.isatty():
            line = input(prompt)
        else:  # answers go to a file, and `input` would write the prompt there, too
            print(prompt, end="", file=sys.stderr, flush=True)
            line = _piped_line(prompt)
        history.add(line)
        return line

    return read_line


def _piped_line(_prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")

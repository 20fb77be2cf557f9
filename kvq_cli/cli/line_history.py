"""What was typed in earlier conversations, for the arrow keys: a file that only its owner can read."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from prompt_toolkit.history import History

from kvq_cli.errors import KvqError
from kvq_cli.files import MAX_TEXT, file_size, replacing

MAX_LINES = 1000
MAX_LENGTH = 2000
"""Longer messages, such as pasted texts, are not kept."""
LINE_BREAK = "\x1f"
"""In the file, in messages of several lines: every message is a line of the file."""


class LineHistory(History):
    """The last `MAX_LINES` messages in `path`; where that cannot be read or written, those of this conversation."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def load_history_strings(self) -> list[str]:
        """The messages of the file, the newest first; shortens a file that has become too long."""
        try:
            file_size(self.path, MAX_TEXT)
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        if len(lines) > MAX_LINES:
            lines = lines[-MAX_LINES:]
            with suppress(KvqError), replacing(self.path) as partial:
                _append(partial, lines)
        return [line.replace(LINE_BREAK, "\n") for line in reversed(lines)]

    def store_string(self, string: str) -> None:
        """Append a message at once, so that conversations in several terminals are all kept."""
        if string.strip() and len(string) <= MAX_LENGTH:
            with suppress(OSError):
                _append(self.path, [string.replace("\n", LINE_BREAK)])


def _append(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "wb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.write("".join(line + "\n" for line in lines).encode(errors="replace"))


def chat_history() -> LineHistory:
    """The history of `kvq chat`, in the user's state folder ($XDG_STATE_HOME, ~/.local/state)."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))
    return LineHistory(folder / "kvq" / "chat_history")

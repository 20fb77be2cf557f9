"""The lines typed in earlier conversations, for the arrow keys: a file that only its owner can read."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

MAX_LINES = 1000
MAX_LENGTH = 2000
"""Longer lines, such as pasted texts, are not kept."""


class LineHistory:
    """The last `MAX_LINES` lines in `path`; where that cannot be read or written, there is no history."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[str]:
        """The lines, the oldest first; shortens a file that has become too long."""
        try:
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return []
        if len(lines) > MAX_LINES:
            lines = lines[-MAX_LINES:]
            partial = self.path.with_name(f".{self.path.name}.{os.getpid()}.partial")
            with suppress(OSError):
                self._append(partial, lines)
                partial.replace(self.path)
        return lines

    def add(self, line: str) -> None:
        """Append a line at once, so that conversations in several terminals are all kept."""
        if line.strip() and len(line) <= MAX_LENGTH:
            with suppress(OSError):
                self._append(self.path, [line])

    @staticmethod
    def _append(path: Path, lines: list[str]) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "wb") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write("".join(line + "\n" for line in lines).encode(errors="replace"))


def chat_history() -> LineHistory:
    """The history of `kvq chat`, in the user's state folder ($XDG_STATE_HOME, ~/.local/state)."""
    folder = Path(os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state"))
    return LineHistory(folder / "kvq" / "chat_history")

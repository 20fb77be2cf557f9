"""Fenced code blocks of documentation pages, and the comments that say how they are tested."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"(?:<!-- (?P<comment>[^\n]*?) -->\n)?```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """language: bash, python, ... comment: "run", "file: NAME", "not run: WHY", or nothing."""

    language: str
    text: str
    comment: str

    @property
    def file(self) -> str | None:
        """The file that the block is."""
        return self.comment.removeprefix("file: ") if self.comment.startswith("file: ") else None

    @property
    def is_run(self) -> bool:
        """Commands are run unless a comment says why not; Python is run where a comment says so."""
        return self.comment == "run" or (self.language == "bash" and not self.comment.startswith("not run: "))

    @property
    def commands(self) -> list[list[str]]:
        """The words of each line of a bash block, without comments."""
        return [words for line in self.text.splitlines() if (words := shlex.split(line, comments=True))]


def blocks(page: str) -> list[Block]:
    """All fenced blocks with a language of a page of docs/."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [Block(found["language"], found["text"], found["comment"] or "") for found in BLOCK.finditer(text)]

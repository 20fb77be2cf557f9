"""The command line that started this command, for records of runs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextvars import ContextVar

_words: ContextVar[Sequence[str]] = ContextVar("_words", default=())


def remember(words: Sequence[str]) -> None:
    """Keep the arguments of `kvq`, before they are parsed."""
    _words.set(tuple(words))


def command_line() -> str:
    """The command as it was typed: `kvq eval --task perplexity`."""
    return shlex.join(["kvq", *_words.get()])

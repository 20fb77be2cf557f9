"""Running prose to hide needles in, cut into words and sentences."""

from __future__ import annotations

import hashlib
import re

from kvq_cli.errors import KvqError

_HEADING = re.compile(r"^=+ .* =+$", re.MULTILINE)
_END = re.compile(r"[.!?][\"'\u201d\u2019)\]]*$")
_NO_END = re.compile(r"^\W*((\w\.)+|(Mr|Mrs|Ms|Dr|St|Prof|Jr|Sr|vs|etc|No|cf)\.)$")
_START = re.compile(r"^[\"'\u201c\u2018(\[]*[A-Z0-9]")


class Haystack:
    """A text as RULER reads an essay: words between white space, from the first on, over and over when it is too short.

    RULER finds sentences with NLTK's punkt model, which must be downloaded; here a sentence ends at a full stop,
    question or exclamation mark that ends no initial or common abbreviation and that a capital or a digit follows.
    Only the places where needles may go depend on it.
    """

    def __init__(self, text: str, name: str) -> None:
        words = _HEADING.sub("", text).split()
        if not words:
            raise KvqError(f"--haystack {name} holds no words")
        self.name = name
        self.digest = hashlib.sha256(" ".join(words).encode()).hexdigest()
        self._sentences = _sentences(words)

    def sentences(self, size: int) -> list[str]:
        """The sentences of the first `size` words; the last one may be cut short."""
        found: list[str] = []
        number = 0
        while size > 0:
            words = self._sentences[number % len(self._sentences)][:size]
            found.append(" ".join(words))
            size -= len(words)
            number += 1
        return found


def _sentences(words: list[str]) -> list[list[str]]:
    found, current = [], []
    for word, following in zip(words, [*words[1:], "A"], strict=True):
        current.append(word)
        if _END.search(word) and not _NO_END.match(word) and _START.match(following):
            found.append(current)
            current = []
    return [*found, current] if current else found

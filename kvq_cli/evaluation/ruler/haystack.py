"""Essay haystacks: running text cut into words and sentences."""

from __future__ import annotations

import hashlib
import re

from kvq_cli.errors import KvqError

_HEADING = re.compile(r"^=+ .* =+$", re.MULTILINE)
_END = re.compile(r"[.!?][\"'\u201d\u2019)\]]*$")
_NO_END = re.compile(r"^\W*((\w\.)+|(Mr|Mrs|Ms|Dr|St|Prof|Jr|Sr|vs|etc|No|cf)\.)$")
_START = re.compile(r"^[\"'\u201c\u2018(\[]*[A-Z0-9]")


class Haystack:
    """An essay haystack as in RULER: words split at white space, the text repeated if it is too short.

    RULER finds sentences with NLTK's punkt model, which must be downloaded. Here a sentence ends at a full stop,
    question mark or exclamation mark that does not end an initial or a common abbreviation and is followed by a capital
    or a digit. Sentence ends only determine where needles may be inserted.
    """

    def __init__(self, text: str, name: str) -> None:
        words = _HEADING.sub("", text).split()
        if not words:
            raise KvqError(f"--haystack {name} contains no words")
        self.name = name
        self.digest = hashlib.sha256(" ".join(words).encode()).hexdigest()
        self._sentences = _sentences(words)

    def sentences(self, size: int) -> list[str]:
        """Sentences of the first `size` words; the last sentence may be incomplete."""
        sentences: list[str] = []
        number = 0
        while size > 0:
            words = self._sentences[number % len(self._sentences)][:size]
            sentences.append(" ".join(words))
            size -= len(words)
            number += 1
        return sentences


def _sentences(words: list[str]) -> list[list[str]]:
    sentences: list[list[str]] = []
    current: list[str] = []
    for word, following in zip(words, [*words[1:], "A"], strict=True):
        current.append(word)
        if _END.search(word) and not _NO_END.match(word) and _START.match(following):
            sentences.append(current)
            current = []
    return [*sentences, current] if current else sentences

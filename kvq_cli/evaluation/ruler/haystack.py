"""Essay haystacks: running text cut into words and sentences."""

from __future__ import annotations

import hashlib
import re

from kvq_cli.errors import KvqError, UsageError

_HEADING = re.compile(r"^=+ .* =+$", re.MULTILINE)
_END = re.compile(r"[.!?][\"'\u201d\u2019\u201c\xbb)\]]*$")
_NO_END = re.compile(r"^\W*((\w\.)+|(Mr|Mrs|Ms|Dr|St|Prof|Jr|Sr|vs|etc|No|cf)\.)$")
#: Opening quotes, brackets, inverted marks; then the first letter or digit of a word.
_FIRST = re.compile(r"^[\"'\u201c\u2018\u201e\xab(\[\xbf\xa1]*(\w)")
#: Full stop, exclamation and question mark of Chinese and Japanese, behind which there is no space.
_WIDE = "\u3002\uff01\uff1f"
_WIDE_QUOTES = "\u201d\u2019\u300d\u300f\u300b\uff09"
_WIDE_SENTENCES = re.compile(rf"[^{_WIDE}]*[{_WIDE}]+[{_WIDE_QUOTES}]*|[^{_WIDE}]+")
_WIDE_END = re.compile(rf"[{_WIDE}][{_WIDE_QUOTES}]*$")


class Haystack:
    """An essay haystack as in RULER: words split at white space, the text repeated if it is too short.

    RULER finds sentences with NLTK's punkt model, which must be downloaded. Here a sentence ends at a full stop,
    question mark or exclamation mark that does not end an initial or a common abbreviation and is followed by a digit
    or a letter that is not lowercase; in Chinese and Japanese at each of these marks, which split words, too. Sentence
    ends only determine where needles may be inserted.
    """

    def __init__(self, text: str, name: str) -> None:
        words = [word for text in _HEADING.sub("", text).split() for word in _WIDE_SENTENCES.findall(text)]
        if not words:
            raise KvqError(f"--haystack {name} contains no words")
        self.name = name
        self.digest = hashlib.sha256(" ".join(words).encode()).hexdigest()
        self._sentences = _sentences(words)

    def check(self, depths: int) -> None:
        """Raise UsageError for fewer sentences than `depths` of needles: most needles would lie at the same place."""
        if (found := len(self._sentences)) < depths:
            raise UsageError(
                f"--haystack {self.name}: sentences found: {found}; needles lie at {depths} depths between sentences: "
                "give a longer text, whose sentences begin with a capital letter and end with . ! or ?"
            )

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
        if _ends(word, following):
            sentences.append(current)
            current = []
    return [*sentences, current] if current else sentences


def _ends(word: str, following: str) -> bool:
    """Whether a sentence ends between two words."""
    if _WIDE_END.search(word):
        return True
    if not _END.search(word) or _NO_END.match(word):
        return False
    first = _FIRST.match(following)
    return first is not None and (first[1].isdigit() or (first[1].isalpha() and not first[1].islower()))

"""Contents of samples, one type per task family: families draw them, templates turn them into prompts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Needles:
    """Needles (key/value sentences) in a haystack, and the queried keys.

    lines:   the haystack with the needles, in order.
    prose:   lines are running text, joined by blanks; else joined by line breaks.
    kind:    type of the values: `numbers`, `words` or `uuids`.
    queries: queried keys; values: number of values per key.
    """

    lines: list[str]
    prose: bool
    kind: str
    queries: list[str]
    values: int

    @property
    def single(self) -> bool:
        return len(self.queries) * self.values == 1


@dataclass(frozen=True)
class Chain:
    """Variable assignments in a haystack of noise; the answer is `names`, the variables with the value `value`."""

    lines: list[str]
    value: str
    names: list[str]
    example: Chain | None = None  # solved example in front of the question


@dataclass(frozen=True)
class CommonWords:
    """A list of words with two frequencies; the answer is `common`, the frequent ones."""

    words: list[str]
    common: list[str]
    example: CommonWords | None = None


@dataclass(frozen=True)
class CodedWords:
    """Random words with Zipf frequencies; the answer is `frequent`, the three most frequent after the padding."""

    words: list[str]
    frequent: list[str]


@dataclass(frozen=True)
class Passages:
    """Documents and a question that some of them answer."""

    documents: list[str]
    question: str


@dataclass(frozen=True)
class Prompt:
    """text: the user's message; prefix: beginning of the answer, which the model continues."""

    text: str
    prefix: str = ""

    def __str__(self) -> str:
        return self.text + self.prefix

"""What a sample says, before anybody's wording: the families draw it, the templates put it into a prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Needles:
    """Key/value sentences hidden in a haystack, and the keys that are asked for.

    lines: the haystack in order, needles among it; prose: its lines are running text, else they are lines of a list.
    kind:  what the values are (`numbers`, `words`, `uuids`).
    """

    lines: list[str]
    prose: bool
    kind: str
    queries: list[str]
    values: int  # of each key

    @property
    def single(self) -> bool:
        return len(self.queries) * self.values == 1


@dataclass(frozen=True)
class Chain:
    """Variables assigned to one another in a haystack of noise: which of them have the value `value`?"""

    lines: list[str]
    value: str
    names: list[str]
    example: Chain | None = None  # a solved one to put in front


@dataclass(frozen=True)
class CommonWords:
    """Words drawn with two frequencies; `common` are the frequent ones."""

    words: list[str]
    common: list[str]
    example: CommonWords | None = None


@dataclass(frozen=True)
class CodedWords:
    """Made-up words with Zipf frequencies; `frequent` are the three first ranks after the padding."""

    words: list[str]
    frequent: list[str]


@dataclass(frozen=True)
class Passages:
    """Documents, and a question that some of them answer."""

    documents: list[str]
    question: str


@dataclass(frozen=True)
class Prompt:
    """text: what the user says; prefix: how the answer begins, which the model continues."""

    text: str
    prefix: str = ""

    def __str__(self) -> str:
        return self.text + self.prefix

"""How each family of tasks draws a sample of a given size.

A family knows the smallest and the largest size it can be drawn in, and draws a prompt and its references from a random
generator. What the size counts is the family's own affair: words of prose, lines, words of a list, documents.
"""

from __future__ import annotations

import math
import string
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from random import Random

from kvq_cli.evaluation.ruler.content import Chain, CodedWords, CommonWords, Needles, Prompt
from kvq_cli.evaluation.ruler.haystack import Haystack
from kvq_cli.evaluation.ruler.questions import QuestionSet
from kvq_cli.evaluation.ruler.tasks import RulerTask
from kvq_cli.evaluation.ruler.templates import Templates
from kvq_cli.evaluation.ruler.words import adjectives, list_words, nouns
from kvq_cli.reference.prompts import NOISE, needle

SHORT, SHORTEST = 4096, 1024
"""Below SHORT RULER repeats words less often. Below SHORTEST, where RULER does not go, a list would not fit else."""
EXAMPLE_TOKENS = 500
"""Longest solved example of variable tracking."""
_ZETA = {2.0: math.pi**2 / 6}
"""Riemann's zeta function where RULER needs it."""
_DEPTHS = [round(index * 100 / 39) for index in range(40)]


@dataclass(frozen=True)
class Sources:
    """What the samples are made of besides chance."""

    essay: Haystack
    questions: Callable[[str], QuestionSet]  # by RULER's name of the data set: squad, hotpotqa


class Family(ABC):
    """One task at one context length. count: how many samples there are, where there is an end to them."""

    count: int | None = None
    largest: int | None = None

    def __init__(
        self, task: RulerTask, context: int, templates: Templates, sources: Sources, tokens: Callable[[str], int]
    ):
        self.args = task.args
        self.context = context
        self.templates = templates
        self.sources = sources
        self.tokens = tokens

    def smallest(self, index: int) -> int:
        return 1

    @abstractmethod
    def draw(self, rng: Random, size: int, index: int) -> tuple[Prompt, list[str]]:
        """A prompt of `size` units and its references. `index` is the sample's number."""


class Niah(Family):
    """Needle in a haystack: the size is words of prose, or lines of noise or of other needles."""

    def smallest(self, index: int) -> int:
        return 1 if self.args["haystack"] == "essay" else self.args["keys"] * self.args["values"]

    def draw(self, rng: Random, size: int, index: int) -> tuple[Prompt, list[str]]:
        kind, values = self.args["value"], self.args["values"]
        keys = _distinct(rng, self.args["key"], self.args["keys"])
        held = {key: _distinct(rng, kind, values) for key in keys}
        needles = [needle(key, value, kind) for key in keys for value in held[key]]
        rng.shuffle(needles)
        prose = self.args["haystack"] == "essay"
        lines = self._in_prose(rng, size, needles) if prose else self._in_lines(rng, size, needles, keys)
        queries = rng.sample(keys, self.args["queries"])
        content = Needles(lines, prose, kind, queries, values)
        return self.templates.needles(content), [value for key in queries for value in held[key]]

    def _in_prose(self, rng: Random, size: int, needles: list[str]) -> list[str]:
        sentences = self.sources.essay.sentences(size)
        depths = sorted(rng.sample(_DEPTHS, len(needles)))
        places = [0, *(int(len(sentences) * depth / 100) for depth in depths), len(sentences)]
        stretches = [" ".join(sentences[start:end]) for start, end in pairwise(places)]
        return [part for pair in zip(stretches, needles, strict=False) for part in pair] + stretches[-1:]

    def _in_lines(self, rng: Random, size: int, needles: list[str], keys: list[str]) -> list[str]:
        if self.args["haystack"] == "noise":
            lines = [NOISE] * size
        else:
            kind = self.args["value"]
            others = _distinct(rng, self.args["key"], size, besides=keys)
            lines = [needle(key, _random(rng, kind), kind) for key in others]
        for place, one in zip(sorted(rng.sample(range(size), len(needles)), reverse=True), needles, strict=True):
            lines.insert(place, one)
        return lines


class VariableTracking(Family):
    """A chain of assignments in noise: the size is lines of noise."""

    def smallest(self, index: int) -> int:
        return self.args["hops"] + 1

    def draw(self, rng: Random, size: int, index: int) -> tuple[Prompt, list[str]]:
        example = self._chain(rng, self._example_lines, letters=3) if self.templates.examples else None
        content = self._chain(rng, size, letters=5, example=example)
        return self.templates.chain(content), content.names

    def _chain(self, rng: Random, size: int, letters: int, example: Chain | None = None) -> Chain:
        names: dict[str, None] = {}
        while len(names) < self.args["hops"] + 1:
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        value = str(rng.randrange(10000, 99999))
        links = list(zip([value, *names], names, strict=False))
        facts = [self.templates.assignment(target, source, source == value) for source, target in links]
        lines = [NOISE] * size
        for shift, place in enumerate(sorted(rng.sample(range(size), len(facts)))):
            lines.insert(place + shift, facts[shift])
        return Chain(lines, value, list(names), example)

    @cached_property
    def _example_lines(self) -> int:
        """As many lines as the solved example may have: RULER's 500 tokens, or a quarter of a short context."""
        limit = min(EXAMPLE_TOKENS, self.context // 4)
        lines = self.smallest(0)
        while self._example_tokens(lines + 1) <= limit:
            lines += 1
        return lines

    def _example_tokens(self, lines: int) -> int:
        return self.tokens(str(self.templates.chain(self._chain(Random(0), lines, letters=3))))


class CommonWordsExtraction(Family):
    """Ten words that a numbered list repeats more often than the others: the size is different words."""

    @property
    def largest(self) -> int:  # type: ignore[override]
        return len(list_words())

    def smallest(self, index: int) -> int:
        return self.args["common"]

    def draw(self, rng: Random, size: int, index: int) -> tuple[Prompt, list[str]]:
        short = self.context < SHORT
        example = None
        if self.templates.examples:
            example = self._list(rng, 20, 3, 1) if short else self._list(rng, 40, 10, 3)
        often, seldom = (6, 1) if short else (self.args["often"], self.args["seldom"])
        often = 3 if self.context < SHORTEST else often
        content = self._list(rng, size, often, seldom, example)
        return self.templates.common_words(content), content.common

    def _list(self, rng: Random, size: int, often: int, seldom: int, example: CommonWords | None = None) -> CommonWords:
        drawn = rng.sample(list_words(), size)
        common, rest = drawn[: self.args["common"]], drawn[self.args["common"] :]
        words = common * often + rest * seldom
        rng.shuffle(words)
        return CommonWords(words, common, example)


class FrequentWordsExtraction(Family):
    """Made-up words with frequencies k^-alpha / zeta(alpha): the size is the length that the frequencies refer to."""

    PADDING = "..."

    def smallest(self, index: int) -> int:
        # From here on the three answers differ in frequency from each other and from the rest.
        return 30

    def draw(self, rng: Random, size: int, index: int) -> tuple[Prompt, list[str]]:
        vocabulary: dict[str, None] = {}
        while len(vocabulary) < self._vocabulary:
            vocabulary["".join(rng.choices(string.ascii_lowercase, k=self.args["letters"]))] = None
        ranked = [self.PADDING, *vocabulary][: self._vocabulary]
        while not _clear(self._counts(size)):
            size -= 1  # a tie between the third answer and the next word would leave the question open
        words = [word for word, times in zip(ranked, self._counts(size), strict=True) for _ in range(times)]
        rng.shuffle(words)
        content = CodedWords(words, ranked[1:4])
        return self.templates.coded_words(content), content.frequent

    @property
    def _vocabulary(self) -> int:
        return max(5, (self.context - 50) // 50)  # RULER: a 50th of the context without the answer's 50 tokens

    def _counts(self, size: int) -> list[int]:
        alpha = self.args["alpha"]
        return [int(size * rank**-alpha / _ZETA[alpha]) for rank in range(1, self._vocabulary + 1)]


class QuestionAnswering(Family):
    """A question about one or several of many documents: the size is documents."""

    def __init__(self, task: RulerTask, *rest) -> None:
        super().__init__(task, *rest)
        self.questions = self.sources.questions(self.args["dataset"])
        self.count = len(self.questions)

    def smallest(self, index: int) -> int:
        return self.questions.smallest(index)

    def draw(self, rng: Random, size: int, index: int) -> tuple[Prompt, list[str]]:
        content = self.questions.draw(rng, size, index)
        return self.templates.passages(content), self.questions.answers(index)


FAMILIES: dict[str, type[Family]] = {
    "niah": Niah,
    "vt": VariableTracking,
    "cwe": CommonWordsExtraction,
    "fwe": FrequentWordsExtraction,
    "qa": QuestionAnswering,
}


def _random(rng: Random, kind: str) -> str:
    """A key or a value: a 7-digit number, an adjective-noun pair or a uuid."""
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "words":
        return f"{rng.choice(adjectives())}-{rng.choice(nouns())}"
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _distinct(rng: Random, kind: str, count: int, besides: Sequence[str] = ()) -> list[str]:
    """RULER does not guard against two equal keys; a prompt with two answers to one question would be no test."""
    taken = dict.fromkeys(besides)
    while len(taken) < count + len(besides):
        taken[_random(rng, kind)] = None
    return list(taken)[len(besides) :]


def _clear(counts: list[int]) -> bool:
    """Whether ranks two to four are three different frequencies, and above all that follow."""
    return counts[1] > counts[2] > counts[3] > counts[4]

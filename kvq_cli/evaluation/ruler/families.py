"""Sample generators of RULER's five task families.

A family draws a prompt of a given size and its references from a random generator, and knows its minimum and maximum
size. The unit of the size depends on the family: words of prose, lines, words of a list or documents.
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
from typing import Any

from kvq_cli.evaluation.ruler.haystack import Haystack
from kvq_cli.evaluation.ruler.questions import QuestionSet
from kvq_cli.evaluation.ruler.sample_types import Chain, CodedWords, CommonWords, Needles, Prompt
from kvq_cli.evaluation.ruler.tasks import RulerTask
from kvq_cli.evaluation.ruler.templates import ReferenceTemplates, Templates
from kvq_cli.evaluation.ruler.word_lists import adjectives, list_words, nouns
from kvq_cli.reference.prompts import NOISE, needle

SHORT_CONTEXT = 4096
"""Below this length, RULER's `cwe` repeats words less often."""
SHORTEST_CONTEXT = 640
"""Below this length, `cwe` on the built-in model's prompts repeats words even less often: RULER's common words alone
would fill the context. With RULER's prompts, a context that is too short is an error."""
EXAMPLE_TOKENS = 500
"""Length that RULER fills with the solved example of variable tracking, at every context length."""
_ZETA = {2.0: math.pi**2 / 6}
"""Riemann's zeta function at RULER's values of alpha."""
_DEPTHS = [round(index * 100 / 39) for index in range(40)]


@dataclass(frozen=True)
class Sources:
    """Texts that samples are drawn from. questions: question set by data set name, `squad` or `hotpotqa`."""

    essay: Haystack
    questions: Callable[[str], QuestionSet]


class TaskFamily(ABC):
    """Generator of one task's samples at one context length. count_tokens: tokens of a text, special ones excluded."""

    def __init__(
        self, task: RulerTask, context: int, templates: Templates, sources: Sources, count_tokens: Callable[[str], int]
    ) -> None:
        self.args = task.args
        self.context = context
        self.templates = templates
        self.sources = sources
        self.count_tokens = count_tokens

    @property
    def config(self) -> dict[str, Any]:
        """The parameters of the samples at this context length, for the result file and the resume key."""
        return dict(self.args)

    @property
    def count(self) -> int | None:
        """Number of samples; None if unlimited."""
        return None

    @property
    def max_size(self) -> int | None:
        """Largest size; None if unlimited."""
        return None

    def min_size(self, index: int) -> int:
        """Smallest size of sample `index`."""
        return 1

    @abstractmethod
    def draw(self, rng: Random, size: int, index: int) -> tuple[Prompt, list[str]]:
        """Draw the prompt of sample `index` with `size` units, and its references."""


class Niah(TaskFamily):
    """Needle in a haystack (niah). Size: words of prose, or lines of noise or of other needles."""

    def __init__(
        self, task: RulerTask, context: int, templates: Templates, sources: Sources, count_tokens: Callable[[str], int]
    ) -> None:
        super().__init__(task, context, templates, sources, count_tokens)
        if self.args["haystack"] == "essay":
            sources.essay.check(len(_DEPTHS))

    def min_size(self, index: int) -> int:
        return 1 if self.args["haystack"] == "essay" else self.args["keys"] * self.args["values"]

    def draw(self, rng: Random, size: int, index: int) -> tuple[Prompt, list[str]]:
        kind, values = self.args["value"], self.args["values"]
        keys = _distinct(rng, self.args["key"], self.args["keys"])
        values_of = {key: _distinct(rng, kind, values) for key in keys}
        needles = [needle(key, value, kind) for key in keys for value in values_of[key]]
        rng.shuffle(needles)
        prose = self.args["haystack"] == "essay"
        lines = self._in_prose(rng, size, needles) if prose else self._in_lines(rng, size, needles, keys)
        queries = rng.sample(keys, self.args["queries"])
        content = Needles(lines, prose, kind, queries, values)
        return self.templates.needles(content), [value for key in queries for value in values_of[key]]

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
            other_keys = _distinct(rng, self.args["key"], size, exclude=keys)
            lines = [needle(key, _random_string(rng, kind), kind) for key in other_keys]
        for place, line in zip(sorted(rng.sample(range(size), len(needles)), reverse=True), needles, strict=True):
            lines.insert(place, line)
        return lines


class VariableTracking(TaskFamily):
    """Variable tracking (vt): a chain of assignments in noise. Size: lines of noise."""

    @property
    def config(self) -> dict[str, Any]:
        return super().config | ({"example_tokens": EXAMPLE_TOKENS} if self.templates.examples else {})

    def min_size(self, index: int) -> int:
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
        """Lines of the solved example."""
        lines = self.min_size(0)
        while self._example_tokens(lines + 1) <= EXAMPLE_TOKENS:
            lines += 1
        return lines

    def _example_tokens(self, lines: int) -> int:
        return self.count_tokens(str(self.templates.chain(self._chain(Random(0), lines, letters=3))))


class CommonWordsExtraction(TaskFamily):
    """Common words extraction (cwe): ten words that a numbered list repeats more often. Size: distinct words."""

    @property
    def config(self) -> dict[str, Any]:
        often, seldom = self._occurrences
        return super().config | {"often": often, "seldom": seldom}

    @property
    def max_size(self) -> int:
        return len(list_words())

    def min_size(self, index: int) -> int:
        return self.args["common"]

    def draw(self, rng: Random, size: int, index: int) -> tuple[Prompt, list[str]]:
        example = None
        if self.templates.examples:
            short = self.context < SHORT_CONTEXT
            example = self._list(rng, 20, 3, 1) if short else self._list(rng, 40, 10, 3)
        content = self._list(rng, size, *self._occurrences, example)
        return self.templates.common_words(content), content.common

    @property
    def _occurrences(self) -> tuple[int, int]:
        """How often the list has each common and each other word."""
        if self.context >= SHORT_CONTEXT:
            return self.args["often"], self.args["seldom"]
        if self.context < SHORTEST_CONTEXT and self.templates.name == ReferenceTemplates.name:
            return 3, 1
        return 6, 1

    def _list(self, rng: Random, size: int, often: int, seldom: int, example: CommonWords | None = None) -> CommonWords:
        drawn = rng.sample(list_words(), size)
        common, uncommon = drawn[: self.args["common"]], drawn[self.args["common"] :]
        words = common * often + uncommon * seldom
        rng.shuffle(words)
        return CommonWords(words, common, example)


class FrequentWordsExtraction(TaskFamily):
    """Frequent words extraction (fwe): random words, rank k with size k^-alpha / zeta(alpha) occurrences."""

    PADDING = "..."

    def min_size(self, index: int) -> int:
        # The smallest size at which the three answers differ in frequency from each other and from all other words.
        return 30

    def draw(self, rng: Random, size: int, index: int) -> tuple[Prompt, list[str]]:
        vocabulary: dict[str, None] = {}
        while len(vocabulary) < self._vocabulary:
            vocabulary["".join(rng.choices(string.ascii_lowercase, k=self.args["letters"]))] = None
        ranked = [self.PADDING, *vocabulary][: self._vocabulary]
        while not _distinct_top_ranks(self._counts(size)):
            size -= 1  # a tie between the third answer and the next word would make the question ambiguous
        words = [word for word, times in zip(ranked, self._counts(size), strict=True) for _ in range(times)]
        rng.shuffle(words)
        content = CodedWords(words, ranked[1:4])
        return self.templates.coded_words(content), content.frequent

    @property
    def _vocabulary(self) -> int:
        return max(5, (self.context - 50) // 50)  # RULER: (context - 50 answer tokens) / 50

    def _counts(self, size: int) -> list[int]:
        """Occurrences of each rank; the first is the padding's."""
        alpha = self.args["alpha"]
        return [int(size * rank**-alpha / _ZETA[alpha]) for rank in range(1, self._vocabulary + 1)]


class QuestionAnswering(TaskFamily):
    """Question answering (qa) over many documents, one or two of which have the answer. Size: documents."""

    @cached_property
    def questions(self) -> QuestionSet:
        return self.sources.questions(self.args["dataset"])

    @property
    def count(self) -> int:
        return len(self.questions)

    def min_size(self, index: int) -> int:
        return self.questions.min_documents(index)

    def draw(self, rng: Random, size: int, index: int) -> tuple[Prompt, list[str]]:
        content = self.questions.draw(rng, size, index)
        return self.templates.passages(content), self.questions.answers(index)


FAMILIES: dict[str, type[TaskFamily]] = {
    "niah": Niah,
    "vt": VariableTracking,
    "cwe": CommonWordsExtraction,
    "fwe": FrequentWordsExtraction,
    "qa": QuestionAnswering,
}


def _random_string(rng: Random, kind: str) -> str:
    """A random key or value: a 7-digit number, an adjective-noun pair or a UUID."""
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "words":
        return f"{rng.choice(adjectives())}-{rng.choice(nouns())}"
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _distinct(rng: Random, kind: str, count: int, exclude: Sequence[str] = ()) -> list[str]:
    """`count` distinct random keys or values. Unlike RULER: equal keys would give a question two answers."""
    taken = dict.fromkeys(exclude)
    while len(taken) < count + len(exclude):
        taken[_random_string(rng, kind)] = None
    return list(taken)[len(exclude) :]


def _distinct_top_ranks(counts: list[int]) -> bool:
    """Whether ranks 2 to 4 have distinct frequencies above all later ranks."""
    return counts[1] > counts[2] > counts[3] > counts[4]

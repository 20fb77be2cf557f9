"""Training batches by step: a pure function of the seed and the step, so that an interrupted run can resume."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from kvq_cli.reference.prompts import STOP_TOKEN

from . import tasks

Row = tuple[np.ndarray, np.ndarray, str]
"""Token ids, loss weights and the row's name."""
Draw = Callable[[random.Random, int, tasks.Sentences], tasks.Task]
"""(random numbers, about how many characters, source of sentences) -> a task."""

GOLDEN = (math.sqrt(5) - 1) / 2
PROSE_SHARE, REPEAT_SHARE = 0.45, 0.03
"""Shares of the rows of a mixed batch; the other rows are tasks, half of them with prose as haystack."""


@dataclass(frozen=True)
class Phase:
    """A phase of training. lengths: sequence lengths and their probabilities; alphabet: of phases of random repeats
    alone, how many token ids they use."""

    name: str
    tokens: int
    lengths: tuple[tuple[int, float], ...]
    step_tokens: int
    alphabet: int | None = None

    @property
    def steps(self) -> int:
        """Optimizer steps in this phase."""
        return max(1, self.tokens // self.step_tokens)


def phases(tokens: int, step_tokens: int = 8192, vocabulary: int = 4096) -> list[Phase]:
    """The phases of training for a budget of tokens.

    The first phases are random repeats alone, from which the model learns lookup by content: over a small alphabet of
    token ids that doubles from phase to phase. It does not learn this when it starts with the whole vocabulary, or with
    prose and needles. Then prose, repeats and tasks are mixed, at growing lengths.
    """
    small = step_tokens // 2
    plan = [Phase("repeats of 64", 400 * small, ((64, 1.0),), small, 64)]
    alphabet = 128
    while alphabet <= vocabulary:
        plan.append(Phase(f"repeats of {alphabet}", 50 * small, ((64, 0.7), (128, 0.3)), small, alphabet))
        alphabet *= 2
    remaining = max(0, tokens - sum(phase.tokens for phase in plan))
    mixed = {
        "mixed 256": (0.30, ((256, 1.0),)),
        "mixed 512": (0.30, ((256, 0.3), (512, 0.7))),
        "mixed 1024": (0.40, ((256, 0.2), (512, 0.25), (1024, 0.5), (2048, 0.05))),
    }
    plan += [Phase(name, int(remaining * share), lengths, step_tokens) for name, (share, lengths) in mixed.items()]
    return plan


@dataclass
class Curriculum:
    """The batch of each step. tokens: the prose as token ids; encode: text -> ids without `<|bos|>`."""

    plan: list[Phase]
    tokens: np.ndarray
    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    vocabulary: int
    seed: int = 0
    specials: int = 3

    @property
    def steps(self) -> int:
        """Optimizer steps of the whole plan."""
        return sum(phase.steps for phase in self.plan)

    def phase(self, step: int) -> Phase:
        """The phase that a step belongs to."""
        for phase in self.plan:
            if step < phase.steps:
                return phase
            step -= phase.steps
        return self.plan[-1]

    def batch(self, step: int) -> tuple[np.ndarray, np.ndarray, list[str]]:
        """Token ids `[rows, length + 1]`, loss weights of predicted tokens `[rows, length]`, and the rows' names."""
        phase = self.phase(step)
        rng = random.Random(f"{self.seed}-{step}")
        (length,) = rng.choices([size for size, _ in phase.lengths], [share for _, share in phase.lengths])
        count = max(1, phase.step_tokens // length)
        rows = [self._row(rng, phase, length, step + index / count) for index in range(count)]
        ids, weights, names = zip(*rows, strict=True)
        return np.stack(ids).astype(np.int64), np.stack(weights)[:, 1:], list(names)

    def _row(self, rng: random.Random, phase: Phase, length: int, position: float) -> Row:
        size = length + 1
        if phase.alphabet:
            return *repeats(rng, size, phase.alphabet, self.vocabulary, self.specials), "repeats"
        kind = rng.random()
        if kind < PROSE_SHARE:
            return *self._prose(rng, size, position), "prose"
        if kind < PROSE_SHARE + REPEAT_SHARE:
            if rng.random() < 0.5:
                drawn = int(2 ** rng.uniform(6, math.log2(self.vocabulary)))
                return *repeats(rng, size, drawn, self.vocabulary, self.specials, shuffled=True), "repeats"
            return *self._repeated_prose(rng, size, position), "repeated prose"
        return self.task_row(rng, size, position)

    def _window(self, position: float, size: int) -> np.ndarray:
        # Multiples of the golden ratio are evenly distributed: windows cover the text with few overlaps and gaps.
        start = int((position * 1000 * GOLDEN) % 1.0 * max(1, len(self.tokens) - size))
        return np.asarray(self.tokens[start : start + size], dtype=np.int64)

    def _prose(self, rng: random.Random, size: int, position: float) -> tuple[np.ndarray, np.ndarray]:
        ids = self._window(position, size).copy()
        if rng.random() < 0.8:
            ids[1:] = ids[:-1]
            ids[0] = 0
        return ids, np.ones(size, dtype=np.float32)

    def _repeated_prose(self, rng: random.Random, size: int, position: float) -> tuple[np.ndarray, np.ndarray]:
        ids, weights = self._prose(rng, size, position)
        for _ in range(rng.randint(1, 3)):
            length = rng.randint(8, max(9, size // 6))
            source = rng.randint(1, size // 2 - length)
            target = rng.randint(source + length, size - length)
            ids[target : target + length] = ids[source : source + length]
        return ids, weights

    def sentences(self, rng: random.Random, characters: int) -> list[str]:
        """Sentences of the training prose, of about `characters` characters in total."""
        if characters < 40:
            return []
        text = self.decode(self._window(rng.random(), characters // 2).tolist()).replace("\n", " ")
        drawn, size = [], 0
        for sentence in text.split(". ")[1:-1]:
            drawn.append(sentence.strip() + ".")
            size += len(sentence) + 2
            if size > characters:
                break
        return drawn

    def task_row(self, rng: random.Random, size: int, position: float) -> Row:
        """A row of up to four tasks; the remaining tokens are prose."""
        ids, weights, name = [0], [0.0], ""
        for _ in range(4):
            room = size - len(ids)
            if room < 150 and name:
                break
            task_name, draw = draw_task(rng)
            encoded = self.fit(rng, draw, room if rng.random() < 0.6 else int(room * rng.uniform(0.5, 1.0)))
            if encoded:
                ids += encoded[0]
                weights += encoded[1]
                name = name or task_name
        row, weight = self._prose(rng, size, position)
        row[: len(ids)], weight[: len(ids)] = ids, weights
        return row, weight, name or "prose"

    def fit(self, rng: random.Random, draw: Draw, room: int) -> tuple[list[int], list[float]] | None:
        """Ids and loss weights of a drawn task of at most `room` tokens; None if it does not fit after four draws."""
        characters = int(room * 3.2)
        for _ in range(4):
            task = draw(rng, characters, partial(self.sentences, rng))
            pieces = task.pieces()
            ids, weights = [], []
            for text, weight in pieces:
                part = self.encode(text)
                ids += part
                weights += [weight] * len(part)
            if len(ids) <= room:
                return ids, weights
            characters = int(characters * min(0.95, room / len(ids)) * 0.96)
        return None


def repeats(
    rng: random.Random, size: int, alphabet: int, vocabulary: int, specials: int, shuffled: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Random token ids in which spans are copied to later positions, and loss weights, which are high in copies alone.

    alphabet: how many different ids: the first after the special tokens, or, if `shuffled`, random ones.
    """
    draw = np.random.default_rng(rng.getrandbits(64))
    alphabet = min(alphabet, vocabulary - specials)
    letters = specials + (draw.permutation(vocabulary - specials)[:alphabet] if shuffled else np.arange(alphabet))
    ids = letters[draw.integers(0, len(letters), size)].astype(np.int64)
    weights = np.full(size, 0.02, dtype=np.float32)
    start = rng.randint(min(8, size // 4), max(9, size // 3))
    while start < size:
        length = min(rng.randint(8, max(9, min(size // 2, 64))), start, size - start)
        source = rng.randint(0, start - length)
        ids[start : start + length] = ids[source : source + length]
        # The first token of a copy identifies the copied span and cannot be predicted.
        weights[start + 1 : start + length] = 1.0
        start += length + rng.randint(0, max(1, size // 16))
    return ids, weights


def draw_task(rng: random.Random) -> tuple[str, Draw]:
    """The name of a RULER-like task, and the function that draws it, with random parameters."""
    kind = rng.random()
    hay = "prose" if rng.random() < 0.55 else "noise"
    if kind < 0.03:
        return "single", _needles(rng, {"hay": hay})
    if kind < 0.13:
        return "multikey", _needles(rng, {"hay": hay, "keys": rng.randint(2, 6), "questions": 6})
    if kind < 0.16:
        return "multikey needles", _needles(rng, {"hay": "needles", "keys": rng.randint(1, 5), "questions": 5})
    if kind < 0.28:
        queries = rng.choice([2, 3, 4, 4, 4])
        keys = queries * rng.randint(1, 2)
        return "multiquery", _needles(rng, {"hay": hay, "keys": keys, "queries": queries, "questions": 2})
    if kind < 0.76:
        keys, values = rng.choice([1, 1, 2]), rng.choice([2, 3, 4, 4, 4])
        options = {"hay": hay, "keys": keys, "values": values, "questions": keys}
        return "multivalue", _needles(rng, options, kinds=(0.92, 0.05, 0.03))
    if kind < 0.88:
        hay = "prose" if rng.random() < 0.2 else "noise"
        return "chains", partial(tasks.chains, count=rng.choice([1, 1, 2, 3]), hops=rng.randint(2, 4), hay=hay)
    if kind < 0.92:
        return "common words", partial(tasks.common_words, count=rng.randint(2, 10))
    if kind < 0.94:
        return "coded words", tasks.coded_words
    return "passages", tasks.passages


def _needles(rng: random.Random, options: dict, kinds: tuple[float, float, float] = (0.74, 0.18, 0.08)) -> Draw:
    """kinds: the probabilities of numbers, words and uuids as values."""
    key_kind = rng.choices(["words", "uuids"], [0.92, 0.08])[0]
    value_kind = rng.choices(["numbers", "words", "uuids"], kinds)[0]
    return partial(tasks.needles, **options, key_kind=key_kind, value_kind=value_kind)


def task_texts(seed: int = 0) -> Iterator[str]:
    """Texts of 1,000 random tasks without haystacks, for the tokenizer's training."""
    rng = random.Random(f"{seed}-forms")
    for _ in range(1000):
        _, draw = draw_task(rng)
        task = draw(rng, 500, lambda characters: [])
        yield "".join(text for text, _ in task.pieces() if text != STOP_TOKEN)

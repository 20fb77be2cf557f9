"""Synthetic in-context tasks like RULER's, for training and its evaluation.

A function draws a `Task`: a haystack and questions about it. Its pieces are encoded separately; each begins with a
space or a line break, where the tokenizer splits anyway, so that the result equals encoding the whole text.
"""

from __future__ import annotations

import random
import string
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from kvq_cli.evaluation.ruler import synthetic_qa
from kvq_cli.evaluation.ruler.word_lists import adjectives, nouns
from kvq_cli.reference import prompts

ANSWER, PROSE, FORM = 4.0, 1.0, 0.1
"""Weights in the loss: high for answers, which are few and the purpose of the task; low for unpredictable text."""

Sentences = Callable[[int], list[str]]
"""(characters) -> sentences of running prose of at least that length in total."""


@dataclass
class Task:
    """A context, questions with answers, and `references`: the strings that an answer must contain."""

    context: str
    prose: bool
    questions: list[tuple[str, str]] = field(default_factory=list)
    references: list[list[str]] = field(default_factory=list)

    def ask(self, question: str, answer: str, references: list[str]) -> None:
        """Add a question, its answer, and the strings that RULER's scoring looks for in it."""
        self.questions.append((question, answer))
        self.references.append(references)

    def pieces(self) -> list[tuple[str, float]]:
        """Each piece of text with its loss weight, in order; answers end with the stop token."""
        out = [(" " + self.context, PROSE if self.prose else FORM)]
        for question, answer in self.questions:
            out += [(question, FORM), (answer, ANSWER), (prompts.STOP_TOKEN, ANSWER)]
        return out


def word(rng: random.Random) -> str:
    """RULER's word key: an adjective and a noun."""
    return f"{rng.choice(adjectives())}-{rng.choice(nouns())}"


def value(rng: random.Random, kind: str) -> str:
    """A needle's value: a 7-digit number, a word or a uuid."""
    if kind == "numbers":
        return str(rng.randint(1_000_000, 9_999_999))
    return word(rng) if kind == "words" else str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _distinct(rng: random.Random, kind: str, count: int) -> list[str]:
    values: dict[str, None] = {}
    while len(values) < count:
        values[value(rng, kind)] = None
    return list(values)


def _hide(rng: random.Random, sentences: list[str], facts: list[str]) -> str:
    """The haystack with facts inserted at random depths, in the given order."""
    depths = sorted(rng.randint(0, len(sentences)) for _ in facts)
    for shift, (depth, fact) in enumerate(zip(depths, facts, strict=True)):
        sentences.insert(depth + shift, fact)
    return prompts.context(sentences)


def needles(
    rng: random.Random,
    characters: int,
    sentences: Sentences,
    *,
    hay: str = "noise",
    keys: int = 1,
    values: int = 1,
    queries: int = 1,
    questions: int = 1,
    key_kind: str = "words",
    value_kind: str = "numbers",
) -> Task:
    """Needles in noise, in prose or among other needles: RULER's niah tasks."""
    names = _distinct(rng, key_kind, keys)
    # Several values are asked in ascending order: unlike their order in the context, it determines which value is next.
    held = {name: sorted(_distinct(rng, value_kind, values)) for name in names}
    facts = [prompts.needle(name, each, value_kind) for name in names for each in held[name]]
    room = max(0, characters - sum(map(len, facts)) - questions * queries * values * 60)
    if hay == "needles":
        size = len(prompts.needle(value(rng, key_kind), value(rng, value_kind), value_kind)) + 1
        others = _distinct(rng, key_kind, room // size)
        hay_sentences = [
            prompts.needle(name, value(rng, value_kind), value_kind) for name in others if name not in held
        ]
    else:
        hay_sentences = sentences(room) if hay == "prose" else [prompts.NOISE] * (room // (len(prompts.NOISE) + 1))
    rng.shuffle(facts)
    task = Task(_hide(rng, hay_sentences, facts), prose=hay == "prose")
    asked = 0
    while asked < questions:
        # Ask for every key before repeating any.
        for start in range(0, max(1, len(names) - queries + 1), queries):
            chosen = names[start : start + queries]
            pairs = [(name, each) for name in chosen for each in held[name]]
            references = [each for _, each in pairs]
            task.ask(prompts.question(value_kind, chosen, values > 1), prompts.answer(pairs), references)
            asked += 1
            if asked == questions:
                break
        if asked >= len(names):
            break
    return task


def chains(
    rng: random.Random, characters: int, sentences: Sentences, *, count: int = 1, hops: int = 4, hay: str = "noise"
) -> Task:
    """Chains of variables in noise or prose: RULER's variable tracking."""
    starts = rng.sample(range(10_000, 100_000), count)
    names: set[str] = set()
    while len(names) < count * (hops + 1):
        names.add("".join(rng.choices(string.ascii_uppercase, k=5)))
    drawn = rng.sample(sorted(names), len(names))
    lines = [[str(start), *drawn[i * (hops + 1) : (i + 1) * (hops + 1)]] for i, start in enumerate(starts)]
    facts = [[prompts.chain_fact(a, b) for a, b in zip(line, line[1:], strict=False)] for line in lines]
    order = [i for i, chain in enumerate(facts) for _ in chain]
    rng.shuffle(order)
    remaining = [iter(chain) for chain in facts]
    merged = [next(remaining[i]) for i in order]
    room = max(0, characters - sum(map(len, merged)) - count * 120)
    hay_sentences = sentences(room) if hay == "prose" else [prompts.NOISE] * (room // (len(prompts.NOISE) + 1))
    task = Task(_hide(rng, hay_sentences, merged), prose=hay == "prose")
    for line in rng.sample(lines, min(count, 4)):
        task.ask(prompts.chain_question(line[0]), prompts.chain_answer(line[1:]), line[1:])
    return task


def common_words(rng: random.Random, characters: int, sentences: Sentences, *, count: int = 10) -> Task:
    """A numbered list in which `count` words are frequent: RULER's common words."""
    known = [(3, 1), (6, 1), (10, 3), (30, 3)]
    often, seldom = rng.choice([pair for pair in known if pair[0] * count * 16 < characters] or known[:1])
    others = max(2, characters // 14 - count * often) // seldom
    pool = nouns() + adjectives()
    words = rng.sample(pool, min(len(pool), count + others))
    drawn = words[:count] * often + words[count:] * seldom
    rng.shuffle(drawn)
    return _most_frequent(drawn, prompts.numbered_words(drawn), count, prompts.common_words_question(count))


def coded_words(rng: random.Random, characters: int, sentences: Sentences, *, count: int = 3) -> Task:
    """Words of random letters with Zipf frequencies, padding dots first: RULER's frequent words."""
    coded = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(max(count + 1, characters // 150))]
    ranked, alpha = ["...", *coded], rng.choice([1.5, 2.0])
    weights = [rank**-alpha for rank in range(1, len(ranked) + 1)]
    size = characters // 6 / sum(weights)
    drawn = [text for text, weight in zip(ranked, weights, strict=True) for _ in range(int(size * weight))]
    rng.shuffle(drawn)
    words = [text for text in drawn if text != "..."]
    return _most_frequent(words, prompts.context(drawn), count, prompts.coded_words_question(count))


def passages(rng: random.Random, characters: int, sentences: Sentences, *, questions: int = 4) -> Task:
    """Questions about documents: most can be answered from one of them, some need two."""
    seed = rng.getrandbits(64)
    if characters > 900 and rng.random() < 0.25:
        entries = synthetic_qa.hotpotqa(seed, characters // 900)
        documents = [f"{title}\n{''.join(lines)}" for entry in entries for title, lines in entry["context"]]
        pairs = [(entry["question"], entry["answer"]) for entry in entries]
    else:
        articles = synthetic_qa.squad(seed, max(1, characters // 200))["data"]
        paragraphs = [paragraph for article in articles for paragraph in article["paragraphs"]]
        paragraphs = rng.sample(paragraphs, min(len(paragraphs), max(1, characters // 200)))
        documents = [paragraph["context"] for paragraph in paragraphs]
        pairs = [(qa["question"], qa["answers"][0]["text"]) for paragraph in paragraphs for qa in paragraph["qas"]]
    rng.shuffle(documents)
    numbered = (prompts.document(number, text) for number, text in enumerate(documents, 1))
    task = Task("\n\n".join(numbered), prose=False)
    for question, answer in rng.sample(pairs, min(len(pairs), questions)):
        task.ask(prompts.passage_question(question), prompts.passage_answer(answer), [answer])
    return task


def _most_frequent(drawn: list[str], context: str, count: int, question: str) -> Task:
    # Counter.most_common keeps the order of first appearance among words of equal frequency.
    words = [word for word, _ in Counter(drawn).most_common(count)]
    task = Task(context, prose=False)
    task.ask(question, prompts.words_answer(words), words)
    return task

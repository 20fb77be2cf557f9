"""Synthetic articles with questions in SQuAD's and HotpotQA's formats, used if no question file is given.

All facts are invented, so that no model knows the answers from its training data.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

QUESTIONS = 500
"""Samples per task in RULER."""
_list = str.split
_HEADS = _list("Bren Cal Dor Eld Fen Gar Hal Kel Lor Mar Nor Or Pel Quin Ros Sel Tor Ul Ver Wex")
_MIDDLES = _list("a ar e en i in o on u al")
_PLACES = _list("bury dale ford ham haven low mere mouth stead ton vale wick")
_FIRST = _list("Ada Boris Clara Elena Felix Greta Hugo Ines Jonas Karin Lukas Mira Nils Olga Pavel Rosa Stefan Thea")
_TRADES = _list("architect baker botanist carpenter composer doctor engineer farmer lawyer painter poet sailor weaver")
_THINGS = _list("bridge canal garden library lighthouse mill museum observatory school theatre")
_GOODS = _list("barley bells boats bricks candles cheese glass honey paper salt silk wool")


def squad(seed: int, questions: int = QUESTIONS) -> dict[str, Any]:
    """Articles in SQuAD's format about invented towns: five paragraphs each, with one question per paragraph."""
    rng = Random(f"invented squad {seed}")
    towns, names = _names(rng, _PLACES), _names(rng, _MIDDLES)
    articles: list[dict[str, Any]] = []
    while 5 * len(articles) < questions:
        town = next(towns)
        paragraphs = [_paragraph(*fact) for fact in _town_facts(rng, town, names)]
        articles.append({"title": town, "paragraphs": paragraphs})
    return {"data": articles}


def hotpotqa(seed: int, questions: int = QUESTIONS) -> list[dict[str, Any]]:
    """Two-hop questions in HotpotQA's format: of six documents, two name a builder and a birthplace."""
    rng = Random(f"invented hotpotqa {seed}")
    towns, people = _names(rng, _PLACES), _names(rng, _MIDDLES)
    entries: list[dict[str, Any]] = []
    while len(entries) < questions:
        pairs = [(next(towns), next(people), next(towns), rng.choice(_THINGS)) for _ in range(3)]
        town, _, birthplace, thing = pairs[0]
        context = [document for pair in pairs for document in _two_documents(rng, *pair)]
        rng.shuffle(context)
        question = f"In which town was the person who built the {thing} of {town} born?"
        entries.append({"question": question, "answer": birthplace, "context": context})
    return entries


def _town_facts(rng: Random, town: str, names: Iterator[str]) -> list[tuple[str, str, str]]:
    """Five `(paragraph, question, answer)` about a town."""
    founder = f"{rng.choice(_FIRST)} {next(names)}"
    year, people = str(rng.randint(1100, 1899)), f"{rng.randint(2, 99)},{rng.randint(100, 999)}"
    river, goods, thing, trade = next(names), rng.choice(_GOODS), rng.choice(_THINGS), rng.choice(_TRADES)
    built = str(rng.randint(1900, 1999))
    return [
        (
            f"{town} is a town on the river {river}. The river is crossed by two roads and a railway. "
            f"In spring its water reaches the old market.",
            f"On which river does {town} lie?",
            river,
        ),
        (
            f"{town} was founded in {year}. The oldest houses stand around the square. A wall once ran along the hill.",
            f"In which year was {town} founded?",
            year,
        ),
        (
            f"The founder of {town} was {founder}, {trade} by trade. A statue in the square shows them with a book.",
            f"Who was the founder of {town}?",
            founder,
        ),
        (
            f"{town} has {people} inhabitants. Most of them work in the trade that made the town known: {goods}. "
            f"They are sold as far as the coast.",
            f"What is {town} known for?",
            goods,
        ),
        (
            f"The {thing} of {town} was opened in {built}. It is open every day except Monday. Visitors come by train.",
            f"When was the {thing} of {town} opened?",
            built,
        ),
    ]


def _paragraph(text: str, question: str, answer: str) -> dict[str, Any]:
    answers = [{"text": answer, "answer_start": text.index(answer)}]
    return {"context": text, "qas": [{"question": question, "answers": answers, "is_impossible": False}]}


def _two_documents(rng: Random, town: str, person: str, birthplace: str, thing: str) -> list[tuple[str, list[str]]]:
    """Title and sentences of two documents: who built the thing, and where the builder was born."""
    builder = f"{rng.choice(_FIRST)} {person}"
    first = [
        f"The {thing} of {town} is the largest of the region.",
        f" It was built by {builder} in {rng.randint(1800, 1999)}.",
    ]
    second = [
        f"{builder} was the best-known {rng.choice(_TRADES)} of the time.",
        f" {builder} was born in {birthplace}.",
    ]
    return [(f"The {thing} of {town}", first), (builder, second)]


def _names(rng: Random, endings: Sequence[str]) -> Iterator[str]:
    """An endless sequence of distinct invented names."""
    taken: set[str] = set()
    while True:
        name = rng.choice(_HEADS) + rng.choice(_MIDDLES) + rng.choice("bdfgklmnprstvz") + rng.choice(endings)
        if name not in taken:
            taken.add(name)
            yield name

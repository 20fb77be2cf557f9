"""The synthetic tasks: their answers follow from the context."""

import random
import re
from functools import partial

import pytest
from reference_model import tasks

from kvq_cli.reference import prompts

SENTENCES = ["Rain fell on the hills all night.", "The river rose by a metre.", "Nobody crossed the bridge."]


def prose(characters):
    return SENTENCES * (characters // sum(map(len, SENTENCES)))


def answer_by_search(context, question):
    """The answer to a question, found by searching the context, independently of how the task was drawn."""
    if start := re.search(r"Which variables does (\d+) reach", question):
        found, at = [], start[1]
        while step := re.search(rf"(?<!\S){at} -> (\w+)\.", context):
            at = step[1]
            found.append(at)
        return found
    if asked := re.search(r"the (\d+) most", question):
        words = [word for word in context.split() if not re.fullmatch(r"\d+\.|\.\.\.", word)]
        return sorted(set(words), key=lambda word: (-words.count(word), words.index(word)))[: int(asked[1])]
    keys = re.search(r" for (.*)\?", question)[1]
    return [
        value
        for key in re.split(", | and ", keys)
        for value in sorted(
            re.findall(rf"One of the special magic \w+ for {re.escape(key)} is: (\S+)\.(?!\S)", context)
        )
    ]


KINDS = {
    "single": partial(tasks.needles),
    "prose": partial(tasks.needles, hay="prose", keys=4, questions=4),
    "needles": partial(tasks.needles, hay="needles", keys=2, key_kind="uuids", value_kind="uuids"),
    "multiquery": partial(tasks.needles, keys=4, queries=4),
    "multivalue": partial(tasks.needles, hay="prose", values=4, value_kind="words"),
    "chains": partial(tasks.chains, count=3),
    "common words": partial(tasks.common_words, count=5),
    "coded words": tasks.coded_words,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_answers_follow_from_the_context(kind, seed):
    task = KINDS[kind](random.Random(seed), 2000, prose)
    assert task.questions
    for (question, answer), references in zip(task.questions, task.references, strict=True):
        assert answer_by_search(task.context, question) == references
        assert all(reference in answer for reference in references)
        assert answer.startswith(" ")


def test_pieces_encode_as_the_whole_text(tokenizer):
    task = tasks.needles(random.Random(3), 800, prose, keys=3, queries=2, questions=2)
    pieces = [text for text, _ in task.pieces() if text != prompts.STOP_TOKEN]
    separate = [token for piece in pieces for token in tokenizer.encode(piece, add_special_tokens=False).ids]
    assert separate == tokenizer.encode("".join(pieces), add_special_tokens=False).ids

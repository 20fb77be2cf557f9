"""Questions with documents that answer them: from a file in SQuAD's or HotpotQA's format, or made up."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from kvq_cli.errors import KvqError
from kvq_cli.evaluation.ruler.content import Passages
from kvq_cli.evaluation.ruler.invented import hotpotqa, squad


@dataclass(frozen=True)
class Question:
    """needed: documents that hold the answer; related: others of the same article, which are taken before all else."""

    text: str
    answers: list[str]
    needed: list[str]
    related: list[str]


class QuestionSet:
    """Questions in the order of their file, over one pool of documents."""

    def __init__(self, name: str, questions: Sequence[Question], documents: Sequence[str]) -> None:
        self.name = name
        self.documents = sorted(set(documents))
        self.questions = questions
        self.digest = hashlib.sha256(repr((self.documents, questions)).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.questions)

    def answers(self, index: int) -> list[str]:
        return self.questions[index].answers

    def smallest(self, index: int) -> int:
        return len(self.questions[index].needed)

    def draw(self, rng: Random, size: int, index: int) -> Passages:
        """Question `index` over `size` documents: those needed, then those related, then any; shuffled."""
        question = self.questions[index]
        chosen = list(question.needed)
        if size >= len(self.documents):
            chosen = (self.documents * (size // len(self.documents) + 1))[:size]
        elif size - len(chosen) <= len(question.related):
            chosen += rng.sample(question.related, size - len(chosen))
        else:
            near = {*chosen, *question.related}
            chosen += question.related
            chosen += rng.sample([text for text in self.documents if text not in near], max(0, size - len(chosen)))
        rng.shuffle(chosen)
        return Passages(chosen, question.text)


def read_questions(path: Path) -> tuple[str, QuestionSet]:
    """Read a local file: (`squad` or `hotpotqa`, its questions). KvqError where it is missing or neither of the two."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise KvqError(f"--qa-file {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise KvqError(f"--qa-file {path}: not JSON ({error})") from None
    kind, read = ("hotpotqa", _hotpotqa) if isinstance(data, list) else ("squad", _squad)
    try:
        found = read(data, str(path))
    except (KeyError, TypeError, ValueError) as error:
        raise KvqError(
            f"--qa-file {path}: neither SQuAD's format (an object with data > paragraphs > qas) nor HotpotQA's "
            f"(a list with question, answer, context): {type(error).__name__} {error}"
        ) from None
    if not len(found):
        raise KvqError(f"--qa-file {path}: no question that can be answered")
    return kind, found


def question_source(files: Sequence[Path], seed: int) -> Callable[[str], QuestionSet]:
    """Questions by RULER's name of the data set: from the file in that format, or made up from `seed`."""
    found = dict(read_questions(path) for path in files)
    makers = {
        "squad": lambda: _squad(squad(seed), "generated"),
        "hotpotqa": lambda: _hotpotqa(hotpotqa(seed), "generated"),
    }

    def questions(dataset: str) -> QuestionSet:
        if dataset not in found:
            found[dataset] = makers[dataset]()
        return found[dataset]

    return questions


def _squad(data: Mapping[str, Any], name: str) -> QuestionSet:
    questions, documents = [], []
    for article in data["data"]:
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        documents += texts
        for paragraph, text in zip(article["paragraphs"], texts, strict=True):
            related = [other for other in dict.fromkeys(texts) if other != text]
            for asked in paragraph["qas"]:
                answers = [answer["text"] for answer in asked["answers"]]
                if answers and not asked.get("is_impossible"):
                    questions.append(Question(asked["question"], answers, [text], related))
    return QuestionSet(name, questions, documents)


def _hotpotqa(data: Sequence[Mapping[str, Any]], name: str) -> QuestionSet:
    questions, documents = [], []
    for asked in data:
        texts = [f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"]]
        documents += texts
        questions.append(Question(asked["question"], [str(asked["answer"])], texts, []))
    return QuestionSet(name, questions, documents)

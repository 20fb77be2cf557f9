"""Question sets for `qa_1` and `qa_2`: from files in SQuAD's or HotpotQA's format, or synthetic."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.evaluation.ruler.sample_types import Passages
from kvq_cli.evaluation.ruler.synthetic_qa import hotpotqa, squad
from kvq_cli.files import MAX_RESULT, file_size, load_json, read_text

#: Formats by the first character of a file: SQuAD's is a JSON object, HotpotQA's a list.
_FORMATS = {"{": "squad", "[": "hotpotqa"}


@dataclass(frozen=True)
class Question:
    """needed: documents with the answer; related: distractors from the same article, used before all others."""

    text: str
    answers: list[str]
    needed: list[str]
    related: list[str]


class QuestionSet:
    """Questions in file order with a common pool of documents. name: file or "generated"; digest: of the content."""

    def __init__(self, name: str, questions: Sequence[Question], documents: Sequence[str]) -> None:
        self.name = name
        self.documents = sorted(set(documents))
        self.questions = questions
        self.digest = hashlib.sha256(repr((self.documents, questions)).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.questions)

    def answers(self, index: int) -> list[str]:
        return self.questions[index].answers

    def min_documents(self, index: int) -> int:
        """Number of documents that question `index` needs."""
        return len(self.questions[index].needed)

    def draw(self, rng: Random, size: int, index: int) -> Passages:
        """Question `index` with `size` shuffled documents: the needed ones, then related ones, then random ones."""
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
    """Read a question file: `("squad" or "hotpotqa", questions)`. KvqError if it is missing or has another format."""
    try:
        data = load_json(read_text(path))
    except OSError as error:
        raise KvqError(f"--qa-file {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise KvqError(f"--qa-file {path}: not JSON ({error})") from None
    kind, read = ("hotpotqa", _hotpotqa) if isinstance(data, list) else ("squad", _squad)
    try:
        questions = read(data, str(path))
    except (KeyError, TypeError, ValueError) as error:
        raise KvqError(
            f"--qa-file {path}: neither SQuAD's format (an object with data > paragraphs > qas) nor HotpotQA's "
            f"(a list with question, answer, context): {type(error).__name__} {error}"
        ) from None
    if not len(questions):
        raise KvqError(f"--qa-file {path}: no answerable question")
    return kind, questions


def question_source(files: Sequence[Path], seed: int) -> Callable[[str], QuestionSet]:
    """Function from data set name (`squad`, `hotpotqa`) to questions: of the file in that format, or synthetic.

    Raises UsageError for two files of one format.
    """
    loaded: dict[str, QuestionSet] = {}
    for path in files:
        kind, questions = read_questions(path)
        if kind in loaded:
            raise UsageError(
                f"--qa-file {path} has the format of {loaded[kind].name}, too: give one file of each format, SQuAD's "
                "for qa_1 and HotpotQA's for qa_2"
            )
        loaded[kind] = questions
    generators = {
        "squad": lambda: _squad(squad(seed), "generated"),
        "hotpotqa": lambda: _hotpotqa(hotpotqa(seed), "generated"),
    }

    def find(dataset: str) -> QuestionSet:
        if dataset not in loaded:
            loaded[dataset] = generators[dataset]()
        return loaded[dataset]

    return find


def question_format(path: Path) -> str:
    """The format of a question file, "squad" or "hotpotqa", by its first character; KvqError where it has neither."""
    try:
        file_size(path, MAX_RESULT)
        with open(path, encoding="utf-8") as file:
            first = file.read(4096).lstrip()[:1]
    except OSError as error:
        raise KvqError(f"--qa-file {path}: {error.strerror or error}") from None
    except ValueError:
        first = ""
    if first not in _FORMATS:
        raise KvqError(f"--qa-file {path}: not a readable JSON object or list")
    return _FORMATS[first]


def _squad(data: Mapping[str, Any], name: str) -> QuestionSet:
    questions, documents = [], []
    for article in data["data"]:
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        documents += texts
        for paragraph, text in zip(article["paragraphs"], texts, strict=True):
            related = [other for other in dict.fromkeys(texts) if other != text]
            for entry in paragraph["qas"]:
                answers = [answer["text"] for answer in entry["answers"]]
                if answers and not entry.get("is_impossible"):
                    questions.append(Question(entry["question"], answers, [text], related))
    return QuestionSet(name, questions, documents)


def _hotpotqa(data: Sequence[Mapping[str, Any]], name: str) -> QuestionSet:
    questions, documents = [], []
    for entry in data:
        texts = [f"{title}\n{''.join(sentences)}" for title, sentences in entry["context"]]
        documents += texts
        questions.append(Question(entry["question"], [str(entry["answer"])], texts, []))
    return QuestionSet(name, questions, documents)

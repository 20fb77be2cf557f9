"""RULER's haystacks and question files."""

import hashlib
import json

import pytest

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.evaluation.ruler.families import Niah, Sources
from kvq_cli.evaluation.ruler.haystack import Haystack
from kvq_cli.evaluation.ruler.questions import question_source, read_questions
from kvq_cli.evaluation.ruler.tasks import TASKS
from kvq_cli.evaluation.ruler.templates import StandardTemplates
from kvq_cli.reference import prose


def test_haystack_repeats_its_words():
    text = "= Head =\nOne two. Three\n\nfour   five! Six seven."
    hay = Haystack(text, "test")
    words = ["One", "two.", "Three", "four", "five!", "Six", "seven."]
    for size in (1, 2, 4, 7, 16):
        assert " ".join(hay.sentences(size)).split(" ") == (words * 3)[:size]


def test_sentence_ends():
    hay = Haystack(
        'J. R. Hartley met Mr. Smith at 3.5 a.m. there. "Why?" Nobody knew. (He left.) Then it rained.', "test"
    )
    assert hay.sentences(18) == [
        "J. R. Hartley met Mr. Smith at 3.5 a.m. there.",
        '"Why?"',
        "Nobody knew.",
        "(He left.)",
        "Then it rained.",
    ]


@pytest.mark.parametrize(
    "sentences",
    [
        ["Наступил вечер.", "«Кто там?»", "Ждём с 8 утра!", "Ёлка горит."],
        ["Η νύχτα ήρθε.", "Άρχισε η βροχή!"],
        ["¿Quién es?", "Él llegó.", "¡Pasa!", "2 horas después se fue."],
        ["„Wer da?“", "Über den Fluss.", "Ödland überall!"],
        ["नदी बहती है.", "वह आया!"],
    ],
)
def test_sentence_ends_of_other_languages(sentences):
    assert Haystack(" ".join(sentences), "test").sentences(len(" ".join(sentences).split())) == sentences


def test_chinese_sentences_need_no_space():
    hay = Haystack("夜深了。「谁在那里？」他问！！\n没有人回答。", "test")
    assert hay.sentences(4) == ["夜深了。", "「谁在那里？」", "他问！！", "没有人回答。"]


@pytest.mark.parametrize(("text", "sentences"), [("all lower case. no capital. " * 99, 1), ("One. " * 39, 39)])
def test_haystack_with_too_few_sentences_is_refused(text, sentences):
    """All needles would lie at its beginning."""
    with pytest.raises(
        UsageError, match=rf"--haystack few.txt: sentences found: {sentences}; .*40 depths.*give a longer text"
    ):
        Niah(TASKS["niah_single_2"], 512, StandardTemplates(), Sources(Haystack(text, "few.txt"), None), len)
    few = Sources(Haystack(text, "few.txt"), None)
    assert Niah(TASKS["niah_single_1"], 512, StandardTemplates(), few, len).min_size(0) == 1  # hides them in noise


def test_sentences_of_the_builtin_haystack():
    """Samples depend on them: a change needs another version of results."""
    sentences = Haystack(prose("evaluation"), "prose").sentences(20_000)
    assert len(sentences) == 731
    assert hashlib.sha256("\n".join(sentences).encode()).hexdigest()[:16] == "471cfa9bc50a4e97"


def test_haystack_without_words_is_an_error():
    with pytest.raises(KvqError, match="--haystack empty.txt"):
        Haystack(" \n", "empty.txt")


def _squad(tmp_path, **changes):
    paragraphs = [
        {
            "context": f"Fact {i} is here.",
            "qas": [{"question": f"Q{i}?", "answers": [{"text": f"Fact {i}", "answer_start": 0}]}],
        }
        for i in range(4)
    ]
    paragraphs[3]["qas"].append({"question": "No answer?", "answers": [], "is_impossible": True})
    path = tmp_path / "squad.json"
    path.write_text(
        json.dumps(
            {
                "data": [
                    {"title": "A", "paragraphs": paragraphs},
                    {"title": "B", "paragraphs": [{"context": "Other.", "qas": []}]},
                ],
                **changes,
            }
        )
    )
    return path


def test_squad_file(tmp_path):
    from random import Random

    kind, questions = read_questions(_squad(tmp_path))
    assert (kind, len(questions)) == ("squad", 4)
    passages = questions.draw(Random(0), 3, 1)
    assert passages.question == "Q1?" and len(passages.documents) == 3
    assert "Fact 1 is here." in passages.documents and "Other." not in passages.documents  # its article comes first
    assert sorted(questions.draw(Random(0), 5, 1).documents) == questions.documents
    assert questions.answers(1) == ["Fact 1"]


def test_hotpotqa_file(tmp_path):
    from random import Random

    path = tmp_path / "hotpot.json"
    path.write_text(
        json.dumps([{"question": "Who?", "answer": "She", "context": [["T", ["One.", " Two."]], ["U", ["3."]]]}])
    )
    kind, questions = read_questions(path)
    assert (kind, questions.min_documents(0)) == ("hotpotqa", 2)
    assert sorted(questions.draw(Random(0), 2, 0).documents) == ["T\nOne. Two.", "U\n3."]


def test_question_file_is_used_for_its_format_only(tmp_path):
    source = question_source([_squad(tmp_path)], seed=0)
    assert source("squad").name.endswith("squad.json")
    assert source("hotpotqa").name == "generated"


def test_two_question_files_of_one_format_are_refused(tmp_path):
    first = _squad(tmp_path)
    other = tmp_path / "other.json"
    other.write_text(first.read_text())
    with pytest.raises(UsageError, match=r"--qa-file .*other.json has the format of .*squad.json, too: give one file"):
        question_source([first, other], seed=0)


@pytest.mark.parametrize(
    "content", ['{"data": [{"paragraphs": 3}]}', '{"rows": []}', '[{"question": "a"}]', "[1]", '{"data": []}', "[]"]
)
def test_malformed_question_file_is_named(tmp_path, content):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(KvqError, match=r"--qa-file .*bad\.json"):
        read_questions(path)


def test_missing_and_invalid_question_files_are_errors(tmp_path):
    with pytest.raises(KvqError, match="No such file"):
        read_questions(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text('{"data": [')
    with pytest.raises(KvqError, match="not JSON"):
        read_questions(tmp_path / "cut.json")

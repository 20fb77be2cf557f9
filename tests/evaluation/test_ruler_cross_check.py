"""RULER's scores against lm-eval's implementation, and the known differences."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

common = pytest.importorskip("lm_eval.tasks.ruler.common_utils")
from kvq_cli.evaluation.ruler.scoring import score, string_match_part  # noqa: E402
from kvq_cli.evaluation.ruler.tasks import TASKS  # noqa: E402

WORDS = st.sampled_from(["Oak", "calm-oak", "7", "1234567", "ÉTÉ", "a\tb", "VAR X"])
ANSWERS = st.lists(WORDS | st.text(max_size=6) | st.sampled_from([" ", "\n", "\x00", "\x1f", ", "]), max_size=9)
REFERENCES = st.lists(WORDS, min_size=1, max_size=4)


def theirs(answer, references, metric):
    """lm-eval's score of one sample."""
    document = {"max_length": 4096, "outputs": references}
    process = {"string_match_all": common.process_results, "string_match_part": common.process_results_part}[metric]
    return process(document, [answer])["4096"]


@given(ANSWERS.map("".join), REFERENCES)
def test_string_match_all_equals_lm_eval(answer, references):
    assert score("string_match_all", answer, references) == pytest.approx(
        theirs(answer, references, "string_match_all")
    )


@given(ANSWERS.map("".join), WORDS)
def test_string_match_part_equals_lm_eval_for_one_reference(answer, reference):
    assert score("string_match_part", answer, [reference]) == theirs(answer, [reference], "string_match_part")


@given(ANSWERS.map("".join), REFERENCES)
def test_lm_eval_scores_the_fraction_of_matching_references(answer, references):
    """RULER, and kvq, ask whether any of them does: never less, equal where all or none match."""
    ours, share = score("string_match_part", answer, references), theirs(answer, references, "string_match_part")
    assert ours >= share and ours == float(share > 0)
    assert share == pytest.approx(theirs(answer, references, "string_match_all"))


def test_known_difference_in_question_answering():
    answer, references = "It was Denver.", ["Denver", "Denver Broncos"]
    assert string_match_part(answer, references) == 1
    assert theirs(answer, references, "string_match_part") == 0.5


def test_means_equal_lm_eval():
    scores = [1.0, 0.25, 0.0]
    assert common.aggregate_metrics([*scores, -1]) == pytest.approx(sum(scores) / 3)


def test_tasks_and_answer_lengths_equal_lm_eval():
    """Its 13 tasks under its names, each with as many tokens for the answer."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=common.__file__.rpartition("/")[0], include_defaults=False)
    names = {name: f"ruler_{name}" for name in ("vt", "cwe", "fwe")} | {
        "qa_1": "ruler_qa_squad",
        "qa_2": "ruler_qa_hotpot",
    }
    for name, task in TASKS.items():
        config = manager.task_index[names.get(name, name)].cfg
        assert config["generation_kwargs"]["max_gen_toks"] == task.max_new_tokens, name


def test_solved_example_of_common_words_is_missing_in_lm_eval(make_samples):
    """lm-eval builds a solved example and leaves it out of the prompt; RULER puts it in front, as kvq does."""
    from lm_eval.tasks.ruler import cwe_utils

    prompt = make_samples("cwe", context=2048, wording="standard")[0].prompt
    question = "What are the 10 most common words in the above list?"
    assert prompt.count(question) == 2
    words = lambda text: SimpleNamespace(input_ids=text.split())  # noqa: E731
    (sample,) = cwe_utils.sys_word_pair_random(1, 2048, words)
    assert sample["input"].count(question) == 1 and sample["input_example"].count(question) == 1

"""Parameters of RULER's 13 tasks, and its prompts verbatim."""

import pytest

from kvq_cli.errors import UsageError
from kvq_cli.evaluation.ruler.sample_types import Chain, CodedWords, CommonWords, Needles, Passages
from kvq_cli.evaluation.ruler.tasks import TASKS, ruler_task
from kvq_cli.evaluation.ruler.templates import StandardTemplates, select_templates

# haystack, key, value, keys, values, queries: RULER's paper, table 4 (niah rows); 4 queries need 4 keys.
NIAH = {
    "niah_single_1": ("noise", "words", "numbers", 1, 1, 1),
    "niah_single_2": ("essay", "words", "numbers", 1, 1, 1),
    "niah_single_3": ("essay", "words", "uuids", 1, 1, 1),
    "niah_multikey_1": ("essay", "words", "numbers", 4, 1, 1),
    "niah_multikey_2": ("needle", "words", "numbers", 1, 1, 1),
    "niah_multikey_3": ("needle", "uuids", "uuids", 1, 1, 1),
    "niah_multivalue": ("essay", "words", "numbers", 1, 4, 1),
    "niah_multiquery": ("essay", "words", "numbers", 4, 1, 4),
}


def test_needle_parameters():
    names = ("haystack", "key", "value", "keys", "values", "queries")
    assert {n: tuple(t.args[k] for k in names) for n, t in TASKS.items() if t.family == "niah"} == NIAH


def test_answer_lengths_and_metrics():
    budgets = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
    assert len(TASKS) == 13
    for task in TASKS.values():
        assert task.max_new_tokens == budgets[task.family]
        assert task.metric == ("string_match_part" if task.family == "qa" else "string_match_all")
    assert TASKS["vt"].args == {"haystack": "noise", "hops": 4}
    assert TASKS["cwe"].args == {"common": 10, "often": 30, "seldom": 3}
    assert TASKS["fwe"].args == {"alpha": 2.0, "letters": 6}
    assert (TASKS["qa_1"].args["dataset"], TASKS["qa_2"].args["dataset"]) == ("squad", "hotpotqa")


def test_unknown_name_errors_list_valid_names():
    with pytest.raises(UsageError, match=r"niah_3.*niah_single_1.*qa_2"):
        ruler_task("niah_3")
    with pytest.raises(UsageError, match=r"auto, standard, reference"):
        select_templates("other", "reference")


def test_auto_templates_depend_on_the_model():
    assert select_templates("auto", "reference").name == "reference"
    assert select_templates("auto", "meta-llama/Llama-3.1-8B").name == "standard"
    assert select_templates("standard", "reference").name == "standard"


def test_prompt_with_one_needle():
    prompt = StandardTemplates().needles(Needles(["hay", "needle"], False, "numbers", ["calm-oak"], 1))
    assert str(prompt) == (
        "A special magic number is hidden within the following text. Make sure to memorize it. I will quiz you about "
        "the number afterwards.\nhay\nneedle\nWhat is the special magic number for calm-oak mentioned in the provided "
        "text? The special magic number for calm-oak mentioned in the provided text is"
    )


def test_prompt_with_several_needles():
    prompt = StandardTemplates().needles(Needles(["hay", "needle"], True, "uuids", ["a-b", "c-d", "e-f"], 1))
    assert str(prompt) == (
        "Some special magic uuids are hidden within the following text. Make sure to memorize it. I will quiz you "
        "about the uuids afterwards.\nhay needle\nWhat are all the special magic uuids for a-b, c-d, and e-f mentioned "
        "in the provided text? The special magic uuids for a-b, c-d, and e-f mentioned in the provided text are"
    )


def test_chain_prompt_with_example():
    standard = StandardTemplates()
    lines = [standard.assignment("AB", "111", True), standard.assignment("CD", "AB", False)]
    example = Chain(lines, "111", ["AB", "CD"])
    text = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\nVAR AB = 111\n"
        "VAR CD = VAR AB \nQuestion: Find all variables that are assigned the value 111 in the text above."
    )
    prefix = (
        " Answer: According to the chain(s) of variable assignment in the text above, 2 variables are assigned the "
        "value 111, they are: "
    )
    assert str(standard.chain(example)) == text + prefix
    both = standard.chain(Chain(lines, "111", ["AB", "CD"], example))
    assert str(both) == f"{text}{prefix} AB CD\n\n{text}{prefix}"
    assert both.prefix == prefix


def test_word_list_prompts():
    example = CommonWords(["b", "a", "b"], ["b"])
    prompt = str(StandardTemplates().common_words(CommonWords(["c", "d", "c"], ["c"], example)))
    first, second = prompt.split("\nBelow")
    assert first.endswith(
        "\n1. b 2. a 3. b\nQuestion: What are the 1 most common words in the above list? "
        "Answer: The top 1 words that appear most often in the list are: 1. b"
    )
    assert "Memorize the ones that appear most often.\n1. c 2. d 3. c\nQuestion:" in second
    coded = str(StandardTemplates().coded_words(CodedWords(["...", "abcdef"], ["abcdef"])))
    assert coded == (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. ... abcdef\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
        "What are the three most frequently appeared words in the above coded text? Answer: According to the coded "
        "text above, the three most frequently appeared words are:"
    )


def test_passages_prompt():
    order = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other words."
    )
    assert str(StandardTemplates().passages(Passages(["one", "two"], "Who?"))) == (
        f"{order}\n\nThe following are given documents.\n\nDocument 1:\none\n\nDocument 2:\ntwo\n\n{order}\n\n"
        "Question: Who? Answer:"
    )

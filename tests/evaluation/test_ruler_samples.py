"""RULER samples: length, contents, references, and what they depend on."""

import json
import re
from collections import Counter

import pytest

from kvq_cli.errors import UsageError
from kvq_cli.evaluation.ruler.families import Sources
from kvq_cli.evaluation.ruler.haystack import Haystack
from kvq_cli.evaluation.ruler.questions import question_source
from kvq_cli.evaluation.ruler.samples import RulerSamples
from kvq_cli.evaluation.ruler.tasks import TASKS, ruler_task
from kvq_cli.evaluation.ruler.templates import select_templates
from kvq_cli.reference import prompts, prose

REFERENCE_512 = [(name, 512, "reference") for name in TASKS]
STANDARD_2048 = [(name, 2048, "standard") for name in TASKS]
# The largest unit of each family in tokens, with room for two: how far from full a prompt may stay.
SLACK = {"niah": 160, "vt": 60, "cwe": 30, "fwe": 60, "qa": 160}


@pytest.mark.parametrize(("name", "context", "wording"), REFERENCE_512 + STANDARD_2048)
def test_prompts_fill_the_context_and_leave_room_for_the_answer(make_samples, tokenizer, name, context, wording):
    samples = make_samples(name, context, wording)
    for index in range(3):
        sample = samples[index]
        room = context - TASKS[name].max_new_tokens
        assert sample.ids == tokenizer(sample.prompt).input_ids
        assert room - SLACK[TASKS[name].family] <= len(sample.ids) <= room


@pytest.mark.parametrize("name", [n for n, t in TASKS.items() if t.family == "niah"])
@pytest.mark.parametrize("wording", ["reference", "standard"])
def test_number_of_needles(make_samples, name, wording):
    args = TASKS[name].args
    sample = make_samples(name, 1024, wording)[3]
    pairs = re.findall(r"One of the special magic (\w+) for (\S+) is: (\S+)\.", sample.prompt)
    assert {kind for kind, _, _ in pairs} == {args["value"]}
    if args["haystack"] != "needle":
        assert len(pairs) == args["keys"] * args["values"]
    keys = Counter(key for _, key, _ in pairs)
    assert set(keys.values()) == {args["values"]}  # no key is there twice unless it should
    asked = [key for key in keys if key in sample.prompt.rsplit("What ", 1)[1]]
    assert len(asked) == args["queries"]
    assert Counter(sample.references) == Counter(value for _, key, value in pairs if key in asked)
    assert len(sample.references) == args["queries"] * args["values"]
    shape = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}" if args["value"] == "uuids" else r"\d{7}"
    assert all(re.fullmatch(shape, reference) for reference in sample.references)


@pytest.mark.parametrize("wording", ["reference", "standard"])
def test_chain_references_follow_the_assignments(make_samples, wording):
    sample = make_samples("vt", 1024, wording)[1]
    if wording == "standard":
        example, prompt = sample.prompt.split("\n\nMemorize", 1)
        prompt = "Memorize" + prompt
        links = re.findall(r"VAR (\w+) = (?:VAR )?(\w+)", prompt)
        solved = {source: target for target, source in re.findall(r"VAR (\w{3}) = (?:VAR )?(\w+)", example)}
        assert example.endswith(" " + " ".join(solved.values()))
        assert "Answer: According" in example
    else:
        prompt = sample.prompt
        links = [(target, source) for source, target in re.findall(r"(\w+) -> (\w+)\.", prompt)]
    value = re.search(r"the value (\d+)|variables does (\d+)", prompt)
    current, followed = next(group for group in value.groups() if group), []
    steps = {source: target for target, source in links}
    assert len(steps) == len(links) == 5
    while current in steps:
        current = steps[current]
        followed.append(current)
    assert followed == sample.references
    assert prompt.count(prompts.NOISE) >= 5


# RULER: 30 and 3, below 4096 tokens 6 and 1. Its list does not fit 512 tokens: there, the built-in model's prompts have
# 3 and 1.
@pytest.mark.parametrize(
    ("context", "often", "seldom"), [(512, 3, 1), (640, 6, 1), (1023, 6, 1), (2048, 6, 1), (4095, 6, 1), (4096, 30, 3)]
)
def test_common_words_are_the_most_common(make_samples, context, often, seldom):
    samples = make_samples("cwe", context)
    assert (samples.config["often"], samples.config["seldom"]) == (often, seldom)
    sample = samples[2]
    listed = re.findall(r"(\d+)\. (\S+)", sample.prompt)
    assert [int(number) for number, _ in listed] == list(range(1, len(listed) + 1))
    counts = Counter(word for _, word in listed)
    assert {word for word, count in counts.items() if count == often} == set(sample.references)
    assert {count for word, count in counts.items() if word not in sample.references} == {seldom}
    assert len(sample.references) == 10


@pytest.mark.parametrize("context", [512, 700])
def test_common_words_with_rulers_prompts_are_an_error_where_rulers_list_does_not_fit(make_samples, context):
    """RULER itself never ends there."""
    with pytest.raises(UsageError, match=f"--seqlen {context} is too short for cwe"):
        make_samples("cwe", context, "standard").check(1)


@pytest.mark.parametrize(
    ("context", "often", "seldom", "words", "example"),
    [(1088, 6, 1, 10, (3, 1, 20)), (2048, 6, 1, 10, (3, 1, 20)), (4352, 30, 3, 10, (10, 3, 40))],
)
def test_solved_example_of_common_words(make_samples, context, often, seldom, words, example):
    sample = make_samples("cwe", context, "standard")[0]
    solved, asked = (text.split("\nQuestion")[0] for text in sample.prompt.split("ones that appear most often.\n")[1:])
    for text, expected in ((solved, example[:2]), (asked, (often, seldom))):
        counts = Counter(word for _, word in re.findall(r"(\d+)\. (\S+)", text))
        assert sorted(set(counts.values()), reverse=True) == list(expected)
        assert list(counts.values()).count(expected[0]) == words
    assert len(set(re.findall(r"\d+\. (\S+)", solved))) == example[2]


@pytest.mark.parametrize("context", [1024, 2048])
def test_solved_example_of_variable_tracking_has_rulers_500_tokens(make_samples, tokenizer, context):
    sample = make_samples("vt", context, "standard")[0]
    solved = sample.prompt.split("\n\nMemorize")[0].rsplit("they are: ", 1)[0]
    assert 470 <= len(tokenizer(solved).input_ids) <= 505


@pytest.mark.parametrize("context", [512, 1024, 2048])
def test_frequent_words_are_the_three_most_frequent(make_samples, context):
    for index in range(4):
        sample = make_samples("fwe", context)[index]
        text = sample.prompt.split("\nQuestion")[0]
        counts = Counter(re.findall(r"\S+", text))
        ranked = counts.most_common(5)
        assert ranked[0][0] == "..."
        assert [word for word, _ in ranked[1:4]] == sample.references
        assert ranked[3][1] > ranked[4][1]
        # frequencies fall with the square of the rank: the second is about four times the fourth
        assert ranked[1][1] / ranked[3][1] == pytest.approx(4, abs=1.6)


@pytest.mark.parametrize("name", ["qa_1", "qa_2"])
@pytest.mark.parametrize("wording", ["reference", "standard"])
def test_documents_contain_the_answer(make_samples, name, wording):
    samples = make_samples(name, 1024, wording)
    for index in (0, 7):
        sample = samples[index]
        numbers = re.findall(r"Document (\d+):\n", sample.prompt)
        assert [int(n) for n in numbers] == list(range(1, len(numbers) + 1))
        documents = sample.prompt.rsplit("Question:", 1)[0]
        assert any(reference in documents for reference in sample.references)
    assert samples.count == 500


def test_two_documents_are_needed_for_qa_2(make_samples):
    sample = make_samples("qa_2", 1024)[5]
    thing, town = re.search(r"who built the (\w+) of (\w+) born", sample.prompt).groups()
    builder = re.search(rf"The {thing} of {town} is .*? built by (\w+ \w+) in", sample.prompt)[1]
    assert re.search(rf"{builder} was born in (\w+)", sample.prompt)[1] == sample.references[0]


@pytest.mark.parametrize("name", list(TASKS))
def test_sample_depends_on_task_context_seed_and_index_only(make_samples, name):
    one, other = make_samples(name, 1024), make_samples(name, 1024)
    backwards = [other[index] for index in (5, 2)]
    assert [one[2], one[5]] == backwards[::-1]
    assert one[2].prompt != one[5].prompt
    assert make_samples(name, 1024, seed=1)[2].references != one[2].references or name.startswith("qa")


def test_needles_are_at_all_depths(make_samples):
    samples = make_samples("niah_single_1", 1024)
    depths = []
    for index in range(24):
        sample = samples[index]
        depths.append(sample.prompt.index(sample.references[0]) / len(sample.prompt))
    assert min(depths) < 0.25 and max(depths) > 0.75


@pytest.mark.parametrize(
    ("name", "wording"), [("vt", "standard"), ("cwe", "standard"), ("niah_multiquery", "reference")]
)
def test_too_short_context_error_names_a_sufficient_length(make_samples, name, wording):
    with pytest.raises(UsageError, match=rf"--seqlen 256 is too short for {name}.*--seqlen (\d+) or more") as raised:
        make_samples(name, 256, wording).check(2)
    enough = int(re.search(r"pass --seqlen (\d+)", str(raised.value))[1])
    make_samples(name, enough, wording).check(20)


def test_samples_that_need_more_than_the_first_are_refused(tokenizer, tmp_path):
    """Each question brings its own passage."""
    paragraphs = []
    for name, words in (("one", 20), ("two", 900)):
        question = {"id": name, "question": f"What is {name}?", "answers": [{"text": "water"}]}
        paragraphs.append({"context": " ".join(["water"] * words), "qas": [question]})
    path = tmp_path / "squad.json"
    path.write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))
    own = Sources(Haystack(prose("evaluation"), "prose"), question_source([path], 0))
    samples = RulerSamples(ruler_task("qa_1"), 512, tokenizer, select_templates("standard", ""), own, 0)
    long = next(index for index in range(2) if "two?" in samples._draw(samples._family.min_size(index), index)[0].text)
    if long == 1:
        samples.check(1)
    with pytest.raises(
        UsageError, match=rf"--seqlen 512 is too short for qa_1: sample {long} needs at least"
    ) as raised:
        samples.check(2)
    enough = int(re.search(r"pass --seqlen (\d+)", str(raised.value))[1])
    RulerSamples(ruler_task("qa_1"), enough, tokenizer, select_templates("standard", ""), own, 0).check(2)


def test_chat_template(tokenizer, sources):
    import copy

    from kvq_cli.evaluation.ruler.samples import RulerSamples
    from kvq_cli.evaluation.ruler.tasks import ruler_task
    from kvq_cli.evaluation.ruler.templates import StandardTemplates

    chat = copy.deepcopy(tokenizer)
    chat.chat_template = "<|bos|>[{{ messages[0]['content'] }}]{% if add_generation_prompt %}>{% endif %}"
    samples = RulerSamples(ruler_task("niah_single_1"), 1024, chat, StandardTemplates(), sources, 0, chat=True)
    sample = samples[0]
    assert sample.prompt.startswith("<|bos|>[A special magic number")
    assert sample.prompt.endswith("in the provided text?]> " + sample.prompt.rsplit("> ", 1)[1])
    assert sample.prompt.endswith("mentioned in the provided text is")
    assert sample.ids.count(tokenizer.bos_token_id) == 1
    assert len(sample.ids) + 128 <= 1024

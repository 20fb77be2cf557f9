"""Fixtures: two small tasks of lm-eval with local data, one generative and one multiple choice."""

import json
from random import Random

import pytest

pytest.importorskip("lm_eval")

SUMS = """
task: sums
dataset_path: nobody/sums
dataset_name: small
training_split: train
fewshot_split: train
test_split: test
output_type: generate_until
doc_to_text: "{{story}}\\nQuestion: {{question}}\\nAnswer:"
doc_to_target: "{{answer}}"
num_fewshot: 2
generation_kwargs: {until: ["Question:"], max_gen_toks: 12, do_sample: false, temperature: 0.0}
filter_list:
  - name: strict-match
    filter: [{function: regex, regex_pattern: "#### (\\\\d+)"}, {function: take_first}]
  - name: flexible-extract
    filter: [{function: regex, group_select: -1, regex_pattern: "(\\\\d+)"}, {function: take_first}]
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, regexes_to_ignore: ["(?s).*#### "]}
metadata: {version: 3.0}
"""
LETTERS = """
task: letters
dataset_path: nobody/letters
test_split: test
output_type: multiple_choice
doc_to_text: "{{story}}\\nWhich one?\\nAnswer:"
doc_to_choice: [" alpha", " beta and more", " gamma"]
doc_to_target: label
num_fewshot: 0
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
metadata: {version: 1.0}
"""


WORDS = (
    "the",
    "of",
    "river",
    "stone",
    "and",
    "morning",
    "under",
    "light",
    "a",
    "small",
    "in",
    "castle",
    "green",
    "two",
)


def _story(rng, length):
    return " ".join(rng.choices(WORDS, k=length)).capitalize() + "."


def _rows(seed, lengths):
    rng = Random(seed)
    for length in lengths:
        a, b = rng.randrange(10, 99), rng.randrange(10, 99)
        yield {
            "story": _story(rng, length),
            "question": f"What is {a} and {b}?",
            "answer": f"{a} + {b} = {a + b}\n#### {a + b}",
            "label": rng.randrange(3),
        }


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    """Names of the two tasks: their YAML files, whose data sets are nowhere but in `data_dir`."""
    folder = tmp_path_factory.mktemp("tasks")
    found = {}
    for name, text in (("sums", SUMS), ("letters", LETTERS)):
        (folder / name).mkdir()
        path = folder / name / f"{name}.yaml"
        path.write_text(text)
        found[name] = str(path)
    return found


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_lines(folder / "sums" / "train.jsonl", _rows(1, [60] * 8))
    write_lines(folder / "sums" / "test.jsonl", _rows(2, [60] * 6))
    write_lines(folder / "nobody" / "letters" / "test.jsonl", _rows(3, [60] * 5 + [240]))
    return folder

"""The papers' tasks on tiny local copies: lm-eval scores right answers 1 and wrong answers 0."""

import pytest
from run_records import without_run

from kvq_cli.errors import UsageError
from kvq_cli.evaluation.compared_methods import compared_methods
from kvq_cli.evaluation.lm_eval.model import AttachedLM
from kvq_cli.evaluation.lm_eval.task_groups import GROUPS
from kvq_cli.evaluation.runner import evaluate
from kvq_cli.evaluation.settings import EvaluationSettings
from kvq_cli.methods.registry import build

from .conftest import write_lines

for package in ("jieba", "fuzzywuzzy", "rouge", "langdetect", "math_verify"):
    pytest.importorskip(package)

LONG = {
    "input": "Where does it run?",
    "question": "Where does it run?",
    "context": "The river runs past the old stone house. " * 9,
    "answers": ["past the stone house"],
    "length": 80,
    "language": "en",
    "all_classes": ["Location", "Number of people"],
}
CHOICE = {
    "question": "What is 2 + 2?",
    "options": ["3", "4", "5"],
    "answer": "B",
    "cot_content": "A: Let's think step by step. The answer is (B).",
}
GPQA = {"Correct Answer": "4", "Incorrect Answer 1": "3", "Incorrect Answer 2": "5", "Incorrect Answer 3": "6"}
FOLLOWED = {
    "prompt": "In lower case, please.",
    "instruction_id_list": ["change_case:english_lowercase"],
    "kwargs": [{}],
}
TASKS = {
    # task: (split, row, right answer of a document, wrong answer, figure)
    "longbench_qasper": ("test", LONG, lambda doc: doc["answers"][0], "no idea", "score,none"),
    "longbench_2wikimqa": ("test", LONG, lambda doc: doc["answers"][0], "no idea", "score,none"),
    "longbench_gov_report": ("test", LONG, lambda doc: doc["answers"][0], "no idea", "score,none"),
    "longbench_lcc": ("test", LONG, lambda doc: doc["answers"][0], "", "score,none"),
    "longbench_trec": ("test", {**LONG, "answers": ["Location"]}, lambda doc: "Location", "Number", "score,none"),
    "gsm8k": (
        "test",
        {"question": "What is 2 plus 2?", "answer": "2 + 2 = 4\n#### 4"},
        lambda doc: " 2 + 2 = 4\n#### 4",
        " It is 4.",
        "exact_match,strict-match",
    ),
    "mmlu_pro_law": (
        "test",
        {**CHOICE, "category": "law"},
        lambda doc: "so the answer is (B).",
        "(B)",
        "exact_match,custom-extract",
    ),
    "ifeval": (
        "train",
        {"key": 1, **FOLLOWED},
        lambda doc: "all of it small",
        "Not So",
        "prompt_level_strict_acc,none",
    ),
    "gpqa_main_cot_n_shot": (
        "train",
        {"Question": "What is 2 + 2?", "Explanation": "4", **GPQA},
        lambda doc: f"The answer is {doc['answer']}",
        "The answer is (E)",
        "exact_match,strict-match",
    ),
    "bbh_cot_fewshot_boolean_expressions": (
        "test",
        {"input": "not ( True ) and ( True ) is", "target": "False"},
        lambda doc: "So the answer is False.",
        "So the answer is True.",
        "exact_match,get-answer",
    ),
    "minerva_math500": (
        "test",
        {
            "problem": "What is $1+1$?",
            "solution": "It is $\\boxed{2}$.",
            "answer": "2",
            "subject": "Algebra",
            "level": 1,
        },
        lambda doc: "The final answer is $\\boxed{2}$.",
        "The final answer is $\\boxed{3}$.",
        "math_verify,none",
    ),
}


@pytest.mark.parametrize("name", TASKS)
def test_right_answers_score_1_and_wrong_answers_0(name, loaded, tmp_path, monkeypatch):
    split, row, right, wrong, figure = TASKS[name]
    write_lines(tmp_path / "data" / name / f"{split}.jsonl", [row | {"number": number} for number in range(7)])
    if name.startswith("mmlu_pro"):
        write_lines(tmp_path / "data" / name / "validation.jsonl", [row] * 5)

    def speak(self, requests, disable_tqdm=False):
        cache = dict.fromkeys(("tokens", "compressed", "bytes", "fp16_bytes", "constant_bytes"), 1)
        self.cache_records.append((cache | {"nominal_bits": 2, "packed_bits": 2}, 1))
        return [wrong if request.doc_id == 1 else right(request.doc) for request in requests]

    monkeypatch.setattr(AttachedLM, "generate_until", speak)
    monkeypatch.setattr("nltk.download", lambda *_, **__: True)  # goes to the network
    settings = EvaluationSettings(
        [f"lm_eval:{name}"], data_dir=str(tmp_path / "data"), samples=2, num_fewshot=1, max_new_tokens=256
    )
    chosen = compared_methods([build("kivi", bits=2)])
    document = evaluate(loaded, chosen, settings, tmp_path / "out")
    found = document["methods"]["kivi-2bit"]["results"][f"lm_eval:{name}"]
    assert found[figure] == pytest.approx(0.5, abs=0.01), found
    # Also what shuffles its choices asks the same again: all samples are there.
    monkeypatch.setattr(AttachedLM, "generate_until", None)
    assert without_run(evaluate(loaded, chosen, settings, tmp_path / "out")) == without_run(document)


def test_too_long_answers_are_refused_before_the_first_sample(loaded, tmp_path):
    split, row, *_ = TASKS["mmlu_pro_law"]
    for place in (split, "validation"):
        write_lines(tmp_path / "data" / "mmlu_pro_law" / f"{place}.jsonl", [row] * 5)
    settings = EvaluationSettings(["lm_eval:mmlu_pro_law"], data_dir=str(tmp_path / "data"))
    with pytest.raises(UsageError, match="answers of 2048 tokens leave no room for a prompt in 2048 tokens"):
        evaluate(loaded, compared_methods([build("kivi")]), settings, tmp_path / "out")


def test_group_mean_is_reported(loaded, tmp_path, monkeypatch):
    names = next(group.tasks for group in GROUPS if group.name == "longbench_squat")
    for name in names:
        answers = ["Location"] if name == "longbench_trec" else LONG["answers"]
        write_lines(tmp_path / "data" / name / "test.jsonl", [{**LONG, "answers": answers}])

    def speak(self, requests, disable_tqdm=False):
        cache = dict.fromkeys(("tokens", "compressed", "bytes", "fp16_bytes", "constant_bytes"), 1)
        self.cache_records.append((cache | {"nominal_bits": 2, "packed_bits": 2}, 1))
        return ["Location" for _ in requests]

    monkeypatch.setattr(AttachedLM, "generate_until", speak)
    settings = EvaluationSettings(["lm_eval:longbench_squat"], data_dir=str(tmp_path / "data"), max_new_tokens=256)
    document = evaluate(loaded, compared_methods([build("kivi", bits=2)]), settings, tmp_path / "out")
    one = document["methods"]["kivi-2bit"]
    scores = [one["results"][f"lm_eval:{name}"]["score,none"] for name in names]
    assert scores[names.index("longbench_trec")] == 1 and sum(scores) < 3
    assert one["groups"]["lm_eval:longbench_squat"]["score,none"] == pytest.approx(sum(scores) / 8)
    assert one["group_subtasks"] == {"lm_eval:longbench_squat": [f"lm_eval:{name}" for name in names]}
    assert "longbench_squat" in document["table"]["columns"]

"""lm-eval's tasks by name, and their data from local copies."""

import json
import sys
from pathlib import Path

import pytest

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.evaluation.lm_eval.task_groups import GROUPS, requested_tasks, task_table
from kvq_cli.evaluation.lm_eval.tasks import load_tasks, task_names


@pytest.fixture(scope="module")
def manager():
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    home = lm_eval.tasks.__path__[0]
    folders = [f"{home}/{folder}" for folder in sorted({folder for group in GROUPS for folder in group.folders})]
    return TaskManager(include_path=folders, include_defaults=False)


def test_lm_eval_has_every_task_of_the_papers_in_the_folder_that_is_named(manager):
    for group in GROUPS:
        for task in group.tasks:
            assert task in manager.task_index, task
    filters = {one["name"] for one in manager.task_index["gsm8k"].cfg["filter_list"]}
    assert filters == {"strict-match", "flexible-extract"}


def test_groups_are_taken_apart_and_tasks_named_twice_count_once():
    found = requested_tasks(["perplexity", "lm_eval:longbench_squat", "lm_eval:longbench_qasper", "lm_eval:mine"])
    assert len(found) == 9 and found["longbench_qasper"] == "longbench_squat" and found["mine"] == "mine"


def test_the_wanted_folder_and_file_are_found(tasks, data_dir):
    sums, letters = load_tasks([tasks["sums"], tasks["letters"]], data_dir)
    assert (sums.task_name, len(sums.eval_docs), len(list(sums.training_docs()))) == ("sums", 6, 8)
    assert (letters.task_name, len(letters.eval_docs), letters.config.num_fewshot) == ("letters", 6, 0)
    assert sums.fewshot_instead_of is None and sums.VERSION == 3.0


def test_the_number_of_examples_can_be_set_where_the_task_has_some(tasks, data_dir):
    sums, letters = load_tasks([tasks["sums"], tasks["letters"]], data_dir, num_fewshot=4)
    assert (sums.config.num_fewshot, letters.config.num_fewshot) == (4, 0)


def test_files_as_the_hub_keeps_them(tasks, data_dir, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [json.loads(line) for line in (data_dir / "sums" / "test.jsonl").read_text().splitlines()]
    place = tmp_path / "nobody" / "sums" / "small"
    place.mkdir(parents=True)
    for part, some in enumerate((rows[:4], rows[4:])):
        parquet.write_table(pyarrow.Table.from_pylist(some), place / f"test-{part:05}-of-00002.parquet")
    (task,) = load_tasks([tasks["sums"]], tmp_path)
    assert list(task.eval_docs) == rows


def test_without_the_examples_split_they_are_other_questions(tasks, data_dir, tmp_path):
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "test.jsonl").write_text((data_dir / "sums" / "test.jsonl").read_text())
    (task,) = load_tasks([tasks["sums"]], tmp_path)
    assert task.fewshot_instead_of == "train"
    task.set_fewshot_seed(0)
    for document in task.eval_docs:
        prompt = task.fewshot_context(document, 2)
        assert prompt.count("####") == 2 and prompt.count(document["question"]) == 1


def test_a_missing_copy_is_one_line_with_the_place_to_put_it(tasks, data_dir, tmp_path):
    with pytest.raises(KvqError, match=r"no copy of its data set nobody/sums small: it needs sums/test.jsonl"):
        load_tasks([tasks["sums"]], tmp_path)
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "test.jsonl").write_text('{"story": "a"}\nno JSON\n')
    with pytest.raises(KvqError, match=r"test.jsonl, line 2: not a JSON object"):
        load_tasks([tasks["sums"]], tmp_path)


def test_offline_the_line_names_the_data_set_and_data_dir(tasks, capfd):
    with pytest.raises(KvqError) as caught:
        load_tasks([tasks["sums"]])
    said = str(caught.value)
    assert said.startswith("lm_eval:sums: its data set nobody/sums small cannot be loaded") and "\n" not in said
    assert said.endswith("pass --data-dir DIR with a copy as DIR/sums/test.jsonl")
    assert capfd.readouterr().err == ""


def test_wrong_names(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        load_tasks([str(tmp_path / "none.yaml")])


def test_an_unknown_task_names_those_alike(manager):
    with pytest.raises(UsageError, match="unknown task 'lm_eval:gsm8j': .*similar names: .*gsm8k"):
        list(task_names(manager, "gsm8j"))


def test_groups_and_tags_of_lm_eval_are_taken_apart(manager):
    assert len(list(task_names(manager, "bbh"))) == 27
    longbench = list(task_names(manager, "longbench"))  # a group of groups; its tag names the same
    assert len(longbench) == 21 and sorted(longbench) == list(task_names(manager, "longbench_tasks"))


def test_without_lm_eval_one_line_says_how_to_install_it(fails, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    (tmp_path / "data").mkdir()
    arguments = ("--task", "lm_eval:gsm8k", "--method", "kivi", "--data-dir", "data")
    fails(
        "eval", *arguments, code=1, says="lm_eval:gsm8k needs the package lm-eval, which is not installed: pip install"
    )


def test_the_documented_table_is_that_of_the_program():
    page = Path(__file__).parents[3] / "docs" / "EVALUATION.md"
    assert task_table() in page.read_text()

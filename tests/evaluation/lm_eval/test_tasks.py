"""Loading tasks of lm-eval by name, with data from local copies."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.evaluation.aggregate import tasks_by_group
from kvq_cli.evaluation.lm_eval import tasks
from kvq_cli.evaluation.lm_eval.task_groups import GROUPS, requested_tasks, task_table
from kvq_cli.evaluation.lm_eval.tasks import RequestedGroup, load_tasks, task_names


@pytest.fixture(scope="module")
def manager():
    import lm_eval.tasks
    from lm_eval.tasks import TaskManager

    home = lm_eval.tasks.__path__[0]
    folders = [f"{home}/{folder}" for folder in sorted({folder for group in GROUPS for folder in group.folders})]
    return TaskManager(include_path=folders, include_defaults=False)


def test_lm_eval_has_the_papers_tasks_in_the_named_folders(manager):
    for group in GROUPS:
        for task in group.tasks:
            assert task in manager.task_index, task
    filters = {one["name"] for one in manager.task_index["gsm8k"].cfg["filter_list"]}
    assert filters == {"strict-match", "flexible-extract"}


def test_requested_groups_are_expanded_without_duplicates():
    found = requested_tasks(["perplexity", "lm_eval:longbench_squat", "lm_eval:longbench_qasper", "lm_eval:mine"])
    assert len(found) == 9 and found["mine"] == ["mine"]
    assert found["longbench_qasper"] == ["longbench_squat", "longbench_qasper"]


def test_task_named_before_its_group_is_a_member_of_the_group():
    found = requested_tasks(["lm_eval:longbench_qasper", "lm_eval:longbench"])
    evaluations = [SimpleNamespace(task=task, groups=dict.fromkeys(names, False)) for task, names in found.items()]
    groups = {name: len(tasks) for name, tasks in tasks_by_group(evaluations).items()}
    assert groups == {"longbench": 14}  # longbench_qasper alone is no group


def test_task_of_a_group_of_lm_eval_is_loaded_once_with_all_names(tasks, data_dir, tmp_path):
    for name in ("sums", "letters"):
        (tmp_path / f"{name}.yaml").write_text(Path(tasks[name]).read_text())
    group = "group: both\ntask: [sums, letters]\naggregate_metric_list: [{metric: acc, weight_by_size: true}]\n"
    (tmp_path / "both.yaml").write_text(group)
    alone = str(tmp_path / "letters.yaml")
    loaded = {task.task_name: groups for task, groups in load_tasks([alone, "both"], data_dir).items()}
    whole = RequestedGroup("both", weighted=True)
    assert loaded == {"letters": [RequestedGroup(alone), whole], "sums": [whole]}


def test_local_copy_is_found_by_task_or_data_set(tasks, data_dir):
    sums, letters = load_tasks([tasks["sums"], tasks["letters"]], data_dir)
    assert (sums.task_name, len(sums.eval_docs), len(list(sums.training_docs()))) == ("sums", 6, 8)
    assert (letters.task_name, len(letters.eval_docs), letters.config.num_fewshot) == ("letters", 6, 0)
    assert sums.fewshot_instead_of is None and sums.VERSION == 3.0


def test_num_fewshot_applies_to_few_shot_tasks_only(tasks, data_dir):
    sums, letters = load_tasks([tasks["sums"], tasks["letters"]], data_dir, num_fewshot=4)
    assert (sums.config.num_fewshot, letters.config.num_fewshot) == (4, 0)


def test_parquet_parts_as_on_the_hub_are_read(tasks, data_dir, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [json.loads(line) for line in (data_dir / "sums" / "test.jsonl").read_text().splitlines()]
    place = tmp_path / "nobody" / "sums" / "small"
    place.mkdir(parents=True)
    for part, some in enumerate((rows[:4], rows[4:])):
        parquet.write_table(pyarrow.Table.from_pylist(some), place / f"test-{part:05}-of-00002.parquet")
    (task,) = load_tasks([tasks["sums"]], tmp_path)
    assert list(task.eval_docs) == rows


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ("fewshot_split: train\n", ""),  # lm-eval takes the training split by itself
        ("test_split: test", "validation_split: test"),  # evaluated, since there is no test split
        ("fewshot_split: train\ntest_split: test", "validation_split: test"),
    ],
)
def test_missing_fewshot_split_is_replaced_by_other_questions(tasks, data_dir, tmp_path, before, after):
    definition = Path(tasks["sums"]).read_text()
    assert before in definition
    (tmp_path / "sums.yaml").write_text(definition.replace(before, after))
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "test.jsonl").write_text((data_dir / "sums" / "test.jsonl").read_text())
    (task,) = load_tasks([str(tmp_path / "sums.yaml")], tmp_path)
    assert task.fewshot_instead_of == "train"
    task.set_fewshot_seed(0)
    for document in task.eval_docs:
        prompt = task.fewshot_context(document, 2)
        assert prompt.count("####") == 2 and prompt.count(document["question"]) == 1


def test_missing_local_copy_error_names_its_path(tasks, data_dir, tmp_path):
    with pytest.raises(KvqError, match=r"no copy of its data set nobody/sums small: it needs sums/test.jsonl"):
        load_tasks([tasks["sums"]], tmp_path)
    (tmp_path / "sums").mkdir()
    (tmp_path / "sums" / "test.jsonl").write_text('{"story": "a"}\nno JSON\n')
    with pytest.raises(KvqError, match=r"test.jsonl, line 2: not a JSON object"):
        load_tasks([tasks["sums"]], tmp_path)


def test_offline_error_names_the_data_set_and_data_dir(tasks, capfd):
    with pytest.raises(KvqError) as caught:
        load_tasks([tasks["sums"]])
    said = str(caught.value)
    assert said.startswith("lm_eval:sums: its data set nobody/sums small cannot be loaded") and "\n" not in said
    assert said.endswith("pass --data-dir DIR with a copy as DIR/sums/test.jsonl")
    assert capfd.readouterr().err == ""


def test_missing_task_file_is_an_error(tmp_path):
    with pytest.raises(UsageError, match="no such file"):
        load_tasks([str(tmp_path / "none.yaml")])


def test_unknown_task_error_names_similar_tasks(manager):
    with pytest.raises(UsageError, match="unknown task 'lm_eval:gsm8j': .*; did you mean 'lm_eval:gsm8k'"):
        list(task_names(manager, "gsm8j"))


def test_unknown_names_are_refused_before_data_and_models_are_loaded(fails, tmp_path, monkeypatch):
    """By the index of all tasks, which is that of the papers' tasks here: indexing all takes 15 s."""
    monkeypatch.setattr(tasks, "_indexed_once", lambda *, all_tasks: tasks._indexed(all_tasks=False))
    says = "unknown task 'lm_eval:gsm8j': lm-eval has no task, group or tag of this name; did you mean 'lm_eval:gsm8k'?"
    fails("eval", "--task", "lm_eval:gsm8j", "--method", "kivi", "--model", "./gone", code=2, says=says)
    with pytest.raises(UsageError, match="unknown task 'lm_eval:gsm8k:5'"):
        load_tasks(["gsm8k:5"], tmp_path)


def test_groups_and_tags_are_expanded(manager):
    assert len(list(task_names(manager, "bbh"))) == 27
    longbench = list(task_names(manager, "longbench"))  # a group of groups; its tag names the same
    assert len(longbench) == 21 and sorted(longbench) == list(task_names(manager, "longbench_tasks"))


def test_missing_lm_eval_error_names_the_extra(fails, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    (tmp_path / "data").mkdir()
    arguments = ("--task", "lm_eval:gsm8k", "--method", "kivi", "--data-dir", "data")
    fails(
        "eval", *arguments, code=1, says="lm_eval:gsm8k needs the package lm-eval, which is not installed: pip install"
    )


def test_documented_task_table_is_up_to_date():
    page = Path(__file__).parents[3] / "docs" / "EVALUATION.md"
    assert task_table() in page.read_text()

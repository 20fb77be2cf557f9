"""What results are made from: a change of it is noticed, and results of an earlier version count until they are made
again."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from kvq_cli.evaluation.perplexity import PerplexityEvaluation
from kvq_cli.evaluation.ruler.evaluation import RulerEvaluation
from kvq_cli.papers import inputs, run
from kvq_cli.papers.run import DONE, OLDER, PARTLY, state
from kvq_cli.papers.targets import REFERENCE, target

CHECKOUT = Path(__file__).parents[2]
STUDY = "figure-temporalkv-15"


def test_a_result_without_versions_is_of_an_earlier_one(finished):
    """As the published records of RESULTS 1."""
    root = finished(target(STUDY), results=None, files=None)
    assert state(target(STUDY), REFERENCE, root) == OLDER
    finished(target(STUDY), results=None, command=["kvq", "analyze", "rank", "--samples", "1"])
    assert state(target(STUDY), REFERENCE, root) == PARTLY


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.setattr(inputs, "RESULTS", inputs.RESULTS + 1),
        lambda m: m.setattr(PerplexityEvaluation, "version", 99),
    ],
    ids=["results", "evaluation"],
)
def test_a_new_version_makes_a_result_an_older_one(finished, monkeypatch, change):
    entry = target("perplexity-innerq")
    root = finished(entry)
    with monkeypatch.context() as changed:
        changed.setattr(RulerEvaluation, "version", 99)  # none of its tasks
        assert state(entry, REFERENCE, root) == DONE
        change(changed)
        assert state(entry, REFERENCE, root) == OLDER
    assert state(entry, REFERENCE, root) == DONE


def test_a_release_makes_results_of_fixed_commands_alone_older_ones(finished, monkeypatch):
    """What evaluations and calibrations compute has versions of its own, by which committed results stay current."""
    entry, fixed = target("perplexity-innerq"), target("sizes-papers")
    finished(entry)
    root = finished(fixed)
    monkeypatch.setattr(run, "__version__", "99")
    assert (state(entry, REFERENCE, root), state(fixed, REFERENCE, root)) == (DONE, OLDER)


@pytest.mark.parametrize(
    ("name", "after"),
    [("table-temporalkv-4", OLDER), ("table-xquant-4", OLDER), ("figure-temporalkv-19", OLDER)]
    + [(name, DONE) for name in ("perplexity-innerq", "table-xquant-b1", "figure-temporalkv-15", "sizes-papers")],
)
def test_new_clustering_makes_results_of_clustered_codebooks_alone_older_ones(finished, monkeypatch, name, after):
    """table-xquant-4 compares KVQuant; table-xquant-b1 reads artifacts of weights alone."""
    root = finished(target(name))
    monkeypatch.setattr(inputs, "CLUSTERING", inputs.CLUSTERING + 1)
    assert state(target(name), REFERENCE, root) == after


def test_versions_are_those_of_the_tasks_that_the_command_evaluates(finished, tmp_path):
    ruler, both = target("table-innerq-1"), replace(target("compare-paper"), config="compare.yaml", options="")
    finished(ruler)
    (tmp_path / "compare.yaml").write_text("tasks: [ruler, perplexity]\ncompare: [fp16]\n")
    assert inputs.versions(ruler, REFERENCE)["versions"] == {"ruler": RulerEvaluation.version}
    expected = {"ruler": RulerEvaluation.version, "perplexity": PerplexityEvaluation.version}
    assert inputs.versions(both, REFERENCE)["versions"] == expected
    alone = replace(both, options="--task perplexity")
    assert inputs.versions(alone, REFERENCE)["versions"] == {"perplexity": PerplexityEvaluation.version}
    assert inputs.versions(replace(both, options="--task=lm_eval:gsm8k"), REFERENCE)["versions"].keys() == {
        "lm_eval:gsm8k"
    }


@pytest.mark.parametrize("file", ["compare.yaml", "one.txt", "two.txt", "hay.txt"])
def test_a_changed_file_that_the_command_or_its_config_names_is_noticed(finished, tmp_path, file):
    (tmp_path / "compare.yaml").write_text("task: ruler\nhaystack: hay.txt\ncompare: [fp16, kivi]\n")
    for name in ("one.txt", "two.txt", "hay.txt"):
        (tmp_path / name).write_text("a text")
    entry = replace(target("compare-paper"), config="compare.yaml", options="--dataset one.txt,two.txt,prose")
    root = finished(entry)
    (tmp_path / file).write_text((tmp_path / file).read_text() + "\n")
    assert state(entry, REFERENCE, root) == PARTLY


def test_changed_weights_of_a_model_folder_are_noticed(finished, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    root = finished(target(STUDY), str(folder))
    (folder / "README.md").write_text("no part of the model")
    assert state(target(STUDY), str(folder), root) == DONE
    before = (folder / "model.safetensors").stat()
    (folder / "model.safetensors").write_bytes(b"WEIGHTS")
    os.utime(folder / "model.safetensors", ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert state(target(STUDY), str(folder), root) == PARTLY


def test_an_older_target_is_run_again_once(kvq, finished, tmp_path, monkeypatch):
    entry = target("table-innerq-2")
    root, ran = finished(entry, results=1), []

    def run_target(again, model, *more, **options):
        ran.append(again.id)
        finished(again, model)

    monkeypatch.setattr(run, "run_target", run_target)
    listed = {each["target"]: each["state"] for each in json.loads(kvq("reproduce", "--out", root, "--json").stdout)}
    assert listed[entry.id] == OLDER
    for _ in range(2):
        result = kvq("reproduce", entry.id, "--out", root, "--json")
        assert json.loads(result.stdout)[0]["state"] == DONE, result.stderr
    assert ran == [entry.id]


def test_fixed_commands_have_no_versions(monkeypatch):
    """`bits --papers` computes neither samples nor activations: the published counts stay done."""
    monkeypatch.chdir(CHECKOUT)
    assert state(target("table-temporalkv-13"), REFERENCE) == DONE

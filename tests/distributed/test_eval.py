"""`kvq eval` on workers: the same result files, also if a node dies in the middle."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from held_tasks import held_once, kill_held, started_again

from kvq_cli.distributed import Workers

WORDS = ("eval", "--task", "perplexity", "--seqlen", "128", "--compare", "fp16,kivi-2bit", "--set", "residual=32")


def logs(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.jsonl"))}


def scores(folder: Path) -> dict:
    methods = json.loads((folder / "comparison.json").read_text())["methods"]
    return {label: (each["results"], each["cache"]) for label, each in methods.items()}


def named(task) -> str:
    """Evaluation and first sample."""
    evaluation, unit = task
    return f"{evaluation}-{next(iter(unit.values()))[0]}"


@pytest.mark.slow
def test_eval_on_a_cluster_whose_node_dies_writes_the_files_of_one_process(kvq, doomed, tmp_path, monkeypatch):
    """The samples that the node was evaluating start again, once; others do not."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert kvq(*WORDS, "--windows", "24", "--out", "one").exit_code == 0
    assert kvq(*WORDS, "--windows", "2", "--out", "two").exit_code == 0  # the cluster resumes it
    (cluster, nodes), run, killed, notes = doomed, Workers.run, [], tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setattr(
        Workers, "run", lambda self, function, *more: run(self, held_once(function, named, notes), *more)
    )
    thread = threading.Thread(target=lambda: killed.append(kill_held(cluster, nodes, "evaluate_unit", notes)))
    thread.start()
    result = kvq(*WORDS, "--windows", "24", "--out", "two", "--ray", cluster.address)
    thread.join()
    assert result.exit_code == 0, result.stderr
    assert logs(tmp_path / "two") == logs(tmp_path / "one")
    assert scores(tmp_path / "two") == scores(tmp_path / "one")
    assert started_again(notes) == {killed[0]: 2}
    assert not list(notes.glob("evaluate_unit-perplexity-[01]-*"))

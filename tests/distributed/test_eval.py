"""`kvq eval` on workers: the same result files, also if a node dies in the middle."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path

import pytest
from held_tasks import held_once, kill_held, started_again
from tiny_folder import tiny, tiny_folder  # noqa: F401  # fixtures

from kvq_cli.attention.attach import attach
from kvq_cli.distributed import Workers
from kvq_cli.errors import KvqError
from kvq_cli.evaluation import remote
from kvq_cli.evaluation.compared_methods import compared_methods
from kvq_cli.evaluation.settings import EvaluationSettings, build_evaluations
from kvq_cli.methods.registry import build
from kvq_cli.model_source import ModelSource
from kvq_cli.models import load_model

WORDS = ("eval", "--task", "perplexity", "--seqlen", "128", "--compare", "fp16,kivi-2bit", "--set", "residual=32")


def logs(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*.jsonl"))}


def scores(folder: Path) -> dict:
    methods = json.loads((folder / "comparison.json").read_text())["methods"]
    return {label: (each["results"], each["cache"]) for label, each in methods.items()}


def named(task) -> str:
    """Evaluation, first sample and methods: units of the last window have one method each."""
    evaluation, unit = task
    return f"{evaluation}-{next(iter(unit.values()))[0]}-{'+'.join(unit)}"


def test_workers_that_would_compute_other_records_are_refused(tiny_folder, monkeypatch):  # noqa: F811
    monkeypatch.setattr(remote, "threads_per_task", lambda: 1)
    loaded, settings = load_model(str(tiny_folder)), EvaluationSettings(["perplexity"], samples=1, seqlens=[64])
    methods = compared_methods([build("kivi", bits=2, group=8, residual=8)])
    evaluations = build_evaluations(settings, loaded, lambda *_: lambda _: None)
    with attach(loaded.model, methods[0].attachable, prefill="compressed") as attached:
        state = remote._state(evaluations, {methods[0].label: attached})
    setup = remote.WorkerSetup(ModelSource.of(loaded), settings, methods, 1, state)
    remote._make_ready(setup).attachments.close()
    state["evaluation"]["perplexity-64"]["windows_sha256"] = "of another tokenizer"
    with pytest.raises(KvqError, match="a worker has another evaluation: .*of another tokenizer"):
        remote._make_ready(setup)
    source = dataclasses.replace(setup.source, software="kvq 0")
    with pytest.raises(KvqError, match="a worker has another software: .* instead of kvq 0"):
        source.load()


@pytest.mark.slow
def test_eval_on_a_cluster_whose_node_dies_writes_the_files_of_one_process(kvq, doomed, tmp_path, monkeypatch):
    """The samples that the node was evaluating start again, once; others do not."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert kvq(*WORDS, "--samples", "24", "--out", "one").exit_code == 0
    assert kvq(*WORDS, "--samples", "2", "--out", "two").exit_code == 0  # the cluster resumes it
    (cluster, nodes), run, killed, notes = doomed, Workers.run, [], tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setattr(
        Workers, "run", lambda self, function, *more: run(self, held_once(function, named, notes), *more)
    )
    thread = threading.Thread(target=lambda: killed.append(kill_held(cluster, nodes, "evaluate_unit", notes)))
    thread.start()
    result = kvq(*WORDS, "--samples", "24", "--out", "two", "--ray", cluster.address)
    thread.join()
    assert result.exit_code == 0, result.stderr
    assert logs(tmp_path / "two") == logs(tmp_path / "one")
    assert scores(tmp_path / "two") == scores(tmp_path / "one")
    assert started_again(notes) == {killed[0]: 2}
    assert not list(notes.glob("evaluate_unit-perplexity-128-[01]-*"))

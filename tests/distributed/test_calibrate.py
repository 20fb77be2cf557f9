"""`kvq calibrate` on workers: the same artifact, also if nodes die in the middle or the run is interrupted."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
from held_tasks import held_once, kill_held, started_again
from tiny_folder import tiny, tiny_folder  # noqa: F401  # fixtures

from kvq_cli.calibration import captures, pipeline
from kvq_cli.calibration.plan import plan_calibration
from kvq_cli.calibration.settings import CalibrationOptions
from kvq_cli.distributed import Workers, connected
from kvq_cli.methods.registry import build

OPTIONS = CalibrationOptions(samples=6, seqlen=100, gradients=4, points=300, iterations=5)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def named(task) -> str:
    """A sample's number, or a stream's name and what is done with it."""
    return f"{task}" if isinstance(task, int) else f"{task[0][0]}{task[0][1]}.{task[1].func.__name__}"


@pytest.mark.slow
@pytest.mark.parametrize("doomed", [3], indirect=True)
def test_a_node_dies_in_each_step(tiny, doomed, tmp_path):  # noqa: F811
    """The samples or streams that it was computing start again elsewhere; the artifact is that of one process."""
    (cluster, nodes), notes, killed = doomed, tmp_path / "notes", []
    notes.mkdir()

    class Noted(Workers):
        def run(self, function, shared, tasks):
            return super().run(held_once(function, named, notes), shared, tasks)

    def kill():
        for step in ("_capture", "_apply"):
            killed.append(kill_held(cluster, nodes, step, notes))

    plan = plan_calibration(tiny, build("klt", bits=6.0), OPTIONS)
    pipeline.calibrate(plan, tmp_path / "one")
    with connected(None, cluster.address) as workers:
        thread = threading.Thread(target=kill)
        thread.start()
        pipeline.calibrate(plan, tmp_path / "two", workers=Noted(workers.count, workers.gpus))
        thread.join()
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert started_again(notes) == dict.fromkeys(killed, 2)
    assert sorted(os.listdir(tmp_path)) == ["notes", "one", "two"]


@pytest.mark.slow
def test_interrupted_on_workers_and_resumed_in_one_process(kvq, tiny_folder, tmp_path, monkeypatch):  # noqa: F811
    """Samples that are captured are not captured again."""
    words = ["calibrate", "--model", tiny_folder, "--bits", 2, "--samples", 6, "--seqlen", 100, "--gradients", 4]
    words += ["--points", 300, "--iterations", 5, "--quiet"]
    assert kvq(*words, "--out", "one").exit_code == 0
    write = captures._write_sample

    def interrupt(folder, sample, *more):
        if sample == 3:
            raise KeyboardInterrupt
        write(folder, sample, *more)

    with monkeypatch.context() as patch:
        patch.setattr(captures, "_write_sample", interrupt)
        assert kvq(*words, "--out", "two", "--workers", 2).exit_code == 130
    sampled = []

    def note(folder, sample, *more):
        sampled.append(sample)
        write(folder, sample, *more)

    monkeypatch.setattr(captures, "_write_sample", note)
    result = kvq(*words, "--out", "two", "--resume")
    assert result.exit_code == 0, result.stderr
    assert set(sampled) == {3, 4, 5}
    assert contents(tmp_path / "two") == contents(tmp_path / "one")

"""`kvq calibrate` on workers: the same artifact, also if nodes die in the middle or the run is interrupted."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from tiny_folder import tiny, tiny_folder  # noqa: F401  # fixtures

from kvq_cli.calibration import pipeline
from kvq_cli.calibration.plan import plan_calibration
from kvq_cli.calibration.settings import CalibrationOptions
from kvq_cli.distributed import Workers, connected
from kvq_cli.methods.registry import build

OPTIONS = CalibrationOptions(samples=6, seqlen=100, gradients=4, points=300, iterations=5)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def held_once(function, folder: str):
    """The function; the first call of each kind writes its process and waits to be killed.

    A closure, because workers cannot import this module.
    """

    def call(shared, task):
        import os
        import time
        from contextlib import suppress
        from pathlib import Path

        import ray

        name = f"{function.__name__}-{task if isinstance(task, int) else (task[0], task[1].func.__name__)}"
        (Path(folder) / f"{name}-{time.time_ns()}").touch()
        node = ray.get_runtime_context().get_node_id()
        with suppress(FileExistsError), open(Path(folder) / f"held{function.__name__}", "x") as file:
            file.write(f"{os.getpid()} {node} {name}")
            file.close()
            time.sleep(60)
        return function(shared, task)

    return call


@pytest.mark.slow
def test_a_node_dies_in_each_step(tiny, two_nodes, tmp_path):  # noqa: F811
    """The samples or streams that it was computing start again elsewhere; the artifact is that of one process."""
    cluster, two = two_nodes
    nodes = {node.node_id: node for node in (*two, cluster.add_node(num_cpus=1))}
    cluster.wait_for_nodes()
    notes, killed = tmp_path / "notes", []
    notes.mkdir()

    class Noted(Workers):
        def run(self, function, shared, tasks):
            return super().run(held_once(function, str(notes)), shared, tasks)

    def kill():
        for step in ("_capture", "_apply"):
            held, deadline = notes / f"held{step}", time.monotonic() + 60
            while not held.exists() or not held.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.02)
            process, node, name = held.read_text().split(" ", 2)
            cluster.remove_node(nodes[node], allow_graceful=False)
            os.kill(int(process), signal.SIGKILL)
            killed.append(name)

    plan = plan_calibration(tiny, build("klt", bits=2), OPTIONS)
    pipeline.calibrate(plan, tmp_path / "one")
    with connected(None, cluster.address) as workers:
        thread = threading.Thread(target=kill)
        thread.start()
        pipeline.calibrate(plan, tmp_path / "two", workers=Noted(workers.count, workers.gpus, workers.threads))
        thread.join()
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert len(killed) == 2 and all(len(list(notes.glob(f"{name}-*"))) == 2 for name in killed)
    assert sorted(os.listdir(tmp_path)) == ["notes", "one", "two"]


@pytest.mark.slow
def test_interrupted_on_workers_and_resumed_in_one_process(kvq, tiny_folder, tmp_path, monkeypatch):  # noqa: F811
    """Samples that are captured are not captured again."""
    words = ["calibrate", "--model", tiny_folder, "--bits", 2, "--samples", 6, "--seqlen", 100, "--gradients", 4]
    words += ["--points", 300, "--iterations", 5, "--quiet"]
    assert kvq(*words, "--out", "one").exit_code == 0
    write = pipeline._write_sample

    def interrupt(captures, sample, *more):
        if sample == 3:
            raise KeyboardInterrupt
        write(captures, sample, *more)

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_write_sample", interrupt)
        assert kvq(*words, "--out", "two", "--workers", 2).exit_code == 130
    sampled = []

    def note(captures, sample, *more):
        sampled.append(sample)
        write(captures, sample, *more)

    monkeypatch.setattr(pipeline, "_write_sample", note)
    result = kvq(*words, "--out", "two", "--resume")
    assert result.exit_code == 0, result.stderr
    assert set(sampled) == {3, 4, 5}
    assert contents(tmp_path / "two") == contents(tmp_path / "one")

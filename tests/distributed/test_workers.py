"""Tasks on a Ray cluster of two nodes: order, errors, Ctrl-C, and a node that dies."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from held_tasks import held_once, kill_held, started_again

from kvq_cli.distributed import connected
from kvq_cli.errors import KvqError, NotFiniteError, UsageError


def test_without_options_there_are_no_workers():
    with connected(None, None) as workers:
        assert workers is None


def test_both_options_contradict(kvq):
    with pytest.raises(UsageError, match="--workers with --ray"), connected(2, "auto"):
        pass
    assert kvq("eval", "--workers", "0").exit_code == 2


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(KvqError, match=r"pip install '\.\[ray\]'"), connected(2, None):
        pass


@pytest.mark.parametrize(("address", "reason"), [("127.0.0.1:1", "refused"), ("head", "must be HOST:PORT or auto")])
def test_a_missing_cluster_is_an_error(address, reason):
    with pytest.raises(KvqError, match=f"--ray {address}: .*{reason}"), connected(None, address):
        pass


def square(factor: int, task: int) -> Iterator[int]:
    if task < 0:
        error = NotFiniteError("too small")
        error.method = "kivi"
        raise error
    yield factor * task * task


def several(_: None, task: int) -> Iterator[int]:
    yield from range(task)


def wait_for(path: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, path
        time.sleep(0.05)


def held(folder: str, task: int) -> Iterator[str]:
    yield "begun"
    if task == 1:
        (Path(folder) / "waits").touch()
        time.sleep(120)
    (Path(folder) / f"done-{task}").touch()
    yield "done"


@pytest.mark.slow
def test_results_come_in_the_order_of_the_tasks_and_errors_as_they_were_raised(cluster):
    terminate = signal.getsignal(signal.SIGTERM)
    with connected(None, cluster.address) as workers:
        assert signal.getsignal(signal.SIGTERM) is terminate  # kvq's, which keeps finished work
        assert workers.count == 2
        assert list(workers.run(square, 3, range(9))) == [(task, 3 * task * task) for task in range(9)]
        assert list(workers.run(several, None, [2, 0, 1])) == [(2, 0), (2, 1), (1, 0)]
        with pytest.raises(NotFiniteError, match="too small") as raised:
            list(workers.run(square, 3, [1, -1, 2]))
        assert raised.value.method == "kivi"


def niceness(_: None, task: int) -> Iterator[int]:
    yield os.nice(0)


@pytest.mark.slow
@pytest.mark.usefixtures("_sent_whole")
def test_workers_here_have_the_priority_of_this_process():
    with connected(1, None) as workers:
        assert list(workers.run(niceness, None, [0])) == [(0, os.nice(0))]


@pytest.mark.slow
@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_keeps_the_results_that_have_arrived(cluster, tmp_path):
    def interrupt():
        for name in ("waits", "done-2"):
            wait_for(tmp_path / name)
        time.sleep(1)  # until the result of task 2 is on its way
        os.kill(os.getpid(), signal.SIGINT)

    arrived = []
    with connected(None, cluster.address) as workers:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            for each in workers.run(held, str(tmp_path), range(8)):
                arrived.append(each)
        thread.join()
    assert arrived[:3] == [(0, "begun"), (0, "done"), (1, "begun")] and (1, "done") not in arrived
    assert arrived[3:5] == [(2, "begun"), (2, "done")]


@pytest.mark.slow
def test_a_task_on_a_node_that_dies_runs_again(doomed, tmp_path):
    (cluster, nodes), killed = doomed, []
    with connected(None, cluster.address) as workers:
        thread = threading.Thread(target=lambda: killed.append(kill_held(cluster, nodes, "square", tmp_path)))
        thread.start()
        assert [result for _, result in workers.run(held_once(square, str, tmp_path), 2, range(6))] == [
            2 * task * task for task in range(6)
        ]
        thread.join()
    assert started_again(tmp_path) == {killed[0]: 2}

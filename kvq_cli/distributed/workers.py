"""Workers of a Ray cluster. Ray is an extra: it is imported when a cluster is asked for."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kvq_cli.errors import KvqError, UsageError, WorkerDiedError, reason
from kvq_cli.extras import install_command

Task = TypeVar("Task")
Result = TypeVar("Result")
#: Tasks that are submitted for each worker, so that none waits for the next one.
AHEAD = 2
#: How often a task is repeated whose worker or machine died.
RETRIES = 3


@dataclass(frozen=True)
class Workers:
    """The workers of a cluster that this process is connected to.

    count: tasks that run at the same time. gpus: GPUs of each task.
    """

    count: int
    gpus: int

    def run(
        self, function: Callable[[Any, Task], Iterator[Result]], shared: Any, tasks: Iterable[Task]
    ) -> Iterator[tuple[Task, Result]]:
        """Yield `(task, result)` for each result of the iterator `function(shared, task)`.

        Results come in the order of the tasks, `AHEAD` of which are taken early per worker; each is sent when it is
        there. Everything is pickled; `shared` once. A task whose worker dies runs again on another one, `RETRIES`
        times, then WorkerDiedError. An exception of `function` is raised here. After Ctrl-C, the results that have
        arrived are yielded before KeyboardInterrupt. Other tasks end with the connection: `ray.cancel` of a task that
        is just finishing aborts this process (Ray 2.60: "Tried to complete task that was not pending").
        """
        import ray

        streamed = ray.remote(num_cpus=1, num_gpus=self.gpus, max_retries=RETRIES, num_returns="streaming")
        call: Any = streamed(_stream)
        sent, waiting, left = ray.put(shared), deque[tuple[Task, Any]](), iter(tasks)
        try:
            while True:
                while len(waiting) < AHEAD * self.count and (task := next(left, None)) is not None:
                    waiting.append((task, call.remote(function, sent, task)))
                if not waiting:
                    return
                task, references = waiting[0]
                if (reference := next(references, None)) is None:
                    waiting.popleft()
                else:
                    yield task, _result(reference)
        except KeyboardInterrupt:
            for task, references in waiting:
                while ray.wait([references], timeout=0)[0] and (reference := next(references, None)) is not None:
                    yield task, _result(reference)
            raise


def _stream(function: Callable[[Any, Task], Iterator[Result]], shared: Any, task: Task) -> Iterator[Result]:
    """Runs in a worker: a generator of its own, as Ray streams of nothing else, and resumes it with values that other
    iterators do not take."""
    for result in function(shared, task):  # noqa: UP028 - `yield from` would pass the values on
        yield result


def threads_per_task() -> int:
    """Return a task's share of this machine's threads, where tasks use all CPUs that the machine gives Ray."""
    import ray

    here = ray.get_runtime_context().get_node_id()
    given = next(node["Resources"].get("CPU", 1) for node in ray.nodes() if node["NodeID"] == here)
    return max(1, (os.cpu_count() or 1) // max(1, int(given)))


def _result(reference: Any) -> Any:
    """A result of a task; the exception that it raised."""
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise WorkerDiedError(f"a worker died {RETRIES + 1} times: {reason(error)}") from None


@contextmanager
def connected(workers: int | None, address: str | None, device: str = "cpu") -> Iterator[Workers | None]:
    """Inside the block, the workers of a cluster; None where neither is given: everything runs in this process.

    workers: as many processes on this machine. address: HOST:PORT of a running cluster, or "auto"; each CPU of it is a
    worker, or each GPU where device is "cuda". Raises UsageError for both, KvqError without Ray or a cluster.
    """
    if workers is None and address is None:
        yield None
        return
    if workers is not None and address is not None:
        raise UsageError("--workers with --ray: use one of them")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray gives its workers a niceness of 15: beside another busy process they would hardly run.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
    except ModuleNotFoundError:
        raise KvqError(f"--workers and --ray need Ray: {install_command('ray')}") from None
    gpus = int(device == "cuda")
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        if address is None:
            ray.init(address="local", num_cpus=workers, include_dashboard=False, **quiet)
        else:
            _check_reachable(address)
            ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        option = f"--workers {workers}" if address is None else f"--ray {address}"
        raise KvqError(f"{option}: {reason(error)}") from None
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, terminate)  # Ray sets its own, which keeps no finished work
    try:
        count = int(ray.cluster_resources().get("GPU" if gpus else "CPU", 0))
        if not count:
            raise KvqError(f"--ray {address}: the cluster has no {'GPU' if gpus else 'CPU'}")
        yield Workers(count, gpus)
    finally:
        ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise OSError or ValueError for an address where nothing listens: Ray would try for minutes."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("must be HOST:PORT or auto")
    socket.create_connection((host, int(port)), timeout=10).close()


@contextmanager
def cluster_address(workers: int | None, address: str | None) -> Iterator[str | None]:
    """Inside the block, the address of a cluster that several processes use one after the other: `address`, or of one
    with so many workers on this machine; None where neither is given. Errors as for `connected`."""
    if workers is None:
        yield address
        return
    with connected(workers, address):
        import ray

        yield ray.get_runtime_context().gcs_address

"""Tasks of Ray workers that wait to be killed when they run for the first time."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any


def held_once(function: Callable, name: Callable[[Any], str], folder: Path) -> Callable:
    """`function(shared, task)`, which notes each start of a task in `folder` by its name; the first one of all waits
    to be killed.

    A closure: workers cannot import this module, and are sent it whole.
    """
    place = str(folder)

    def call(shared: Any, task: Any) -> Any:
        import os
        import time
        from contextlib import suppress
        from pathlib import Path

        import ray

        (Path(place) / f"{function.__name__}-{name(task)}-{time.time_ns()}").touch()
        node = ray.get_runtime_context().get_node_id()
        with suppress(FileExistsError), open(Path(place) / f"held{function.__name__}", "x") as file:
            file.write(f"{os.getpid()} {node} {function.__name__}-{name(task)}\n")
            file.close()
            time.sleep(60)
        return function(shared, task)

    return call


def kill_held(cluster: Any, nodes: list[Any], function: str, folder: Path) -> str:
    """Remove the node that holds a task of `function`, and kill its worker: a removed node lets its task finish.
    Returns the task's name, by which `started_again` counts."""
    held, deadline = folder / f"held{function}", time.monotonic() + 120
    while not held.exists() or not held.read_text().endswith("\n"):
        assert time.monotonic() < deadline, f"no task of {function} has started"
        time.sleep(0.02)
    process, node, name = held.read_text().split(maxsplit=2)
    cluster.remove_node(next(each for each in nodes if each.node_id == node), allow_graceful=False)
    os.kill(int(process), signal.SIGKILL)
    return name.strip()


def started_again(folder: Path) -> dict[str, int]:
    """How often each task has started that did so more than once, by its name."""
    counts = Counter(path.name.rpartition("-")[0] for path in folder.iterdir() if not path.name.startswith("held"))
    return {name: count for name, count in counts.items() if count > 1}

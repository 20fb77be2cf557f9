"""Progress as plain lines of text, where stderr is no terminal: in files, pipes and logs of batch systems."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread
from typing import Any

from rich.progress import Progress, TaskID

INTERVAL = 30.0
"""Seconds between two lines at least, besides those at the beginning and end of a step."""


@dataclass
class _Step:
    """Where a step was when it began or began again, and what its last line said."""

    start: float
    initial: float
    printed: float


class ProgressLines(Progress):
    """A `rich.progress.Progress` that writes a line when a step begins, one per 30 s, and one when it ends.

    `capture: 12/64, 0:01:03 elapsed, about 0:04:33 left`. write: called with each line. clock: time in seconds.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(disable=True, get_time=clock)
        self._write_line = write
        self._steps: dict[TaskID, _Step] = {}
        self._last_line = clock()
        self._stopped = Event()

    def start(self) -> None:
        """Write lines from now on, also while nothing is reported."""
        super().start()
        Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while not self._stopped.wait(max(1.0, INTERVAL - (self.get_time() - self._last_line))):
            self.say_running()

    def say_running(self) -> None:
        """Write how far the newest unfinished step is, if nothing was written for 30 s."""
        with self._lock:
            running = [task.id for task in self._tasks.values() if task.completed != task.total]
            if running and self.get_time() - self._last_line >= INTERVAL:
                self._print(running[-1])

    def add_task(self, description: str, *args: Any, **options: Any) -> TaskID:
        task_id = super().add_task(description, *args, **options)
        self._begin(task_id)
        return task_id

    def update(self, task_id: TaskID, **changes: Any) -> None:
        with self._lock:
            super().update(task_id, **changes)
            self._report(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        with self._lock:
            super().advance(task_id, advance)
            self._report(task_id)

    def stop(self) -> None:
        """Write where unfinished steps are, unless their last line says so."""
        super().stop()
        self._stopped.set()
        for task_id, step in self._steps.items():
            if self._tasks[task_id].completed != step.printed:
                self._print(task_id)

    def _begin(self, task_id: TaskID) -> None:
        completed = self._tasks[task_id].completed
        self._steps[task_id] = _Step(self.get_time(), completed, completed)
        self._print(task_id)

    def _report(self, task_id: TaskID) -> None:
        task, step = self._tasks[task_id], self._steps[task_id]
        if task.completed < step.printed:  # the step is done a second time
            self._begin(task_id)
        elif task.completed == step.printed:
            return
        elif task.completed == task.total or self.get_time() - self._last_line >= INTERVAL:
            self._print(task_id)

    def _print(self, task_id: TaskID) -> None:
        task, step = self._tasks[task_id], self._steps[task_id]
        elapsed, done = self.get_time() - step.start, task.completed - step.initial
        line = f"{task.description}: {task.completed:.0f}" + ("" if task.total is None else f"/{task.total:.0f}")
        if done > 0 or elapsed >= INTERVAL:
            line += f", {_duration(elapsed)} elapsed"
            if done > 0 and task.total is not None and task.completed < task.total:
                line += f", about {_duration(elapsed * (task.total - task.completed) / done)} left"
        step.printed, self._last_line = task.completed, self.get_time()
        self._write_line(line)


def _duration(seconds: float) -> str:
    """`0:01:03`"""
    return str(timedelta(seconds=round(seconds)))

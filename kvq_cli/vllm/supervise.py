"""Run vLLM's server as a child, so that a server that dies is known to have died, and nothing of it is left.

When a process of the engine dies, vLLM shuts its server down and exits with code 0, as if it had been asked to; it
kills what is left of the engine, Python's resource tracker among it, so that nobody removes the shared memory. Here the
tracker is that of the parent, which outlives all of them.

    python -m kvq_cli.vllm.supervise FD ARGUMENTS    what the child runs: the command `vllm ARGUMENTS`

`ps` shows the child's arguments to all users: keys are masked in them. Its environment has the arguments to run with.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from types import FrameType

from kvq_cli.errors import KvqError
from kvq_cli.vllm.flags import masked

#: The variable of the child's environment that holds its arguments.
_ARGUMENTS = "KVQ_VLLM_ARGUMENTS"
#: Options of Linux's prctl: the signal that a child gets when its parent dies; adopt orphaned grandchildren.
_PDEATHSIG, _CHILD_SUBREAPER = 1, 36


def supervise(arguments: Sequence[str], patience: float) -> int:
    """Run `vllm ARGUMENTS` until it ends, passing on SIGINT and SIGTERM; returns its exit code.

    Raises KvqError if it ends without such a signal: one of its processes died, or it could not start; and if it has
    not ended `patience` seconds after the first one: its processes are killed then. When this returns, its processes
    are gone; when this process ends, their shared memory is.
    """
    asked = overdue = False
    resource_tracker.ensure_running()
    tracker = resource_tracker.getfd()
    assert tracker is not None
    _prctl(_CHILD_SUBREAPER, 1)
    words = [sys.executable, "-m", __name__, str(tracker), *masked(arguments)]
    environment = {**os.environ, _ARGUMENTS: json.dumps(arguments)}
    child = subprocess.Popen(words, pass_fds=[tracker], env=environment)

    def give_up() -> None:
        nonlocal overdue
        overdue = True
        child.kill()

    timer = threading.Timer(patience, give_up)

    def pass_on(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if not asked:
            asked = True
            timer.start()
        child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        timer.cancel()
        _end_orphans(child.pid)
    if overdue:
        raise KvqError(
            f"the server had not ended {patience:g} s after it was asked to, and was killed: requests in flight got no "
            "answer. A larger --shutdown-timeout gives them more time"
        )
    if not asked:
        raise KvqError(f"the server ended by itself (vLLM's exit code: {code}): its messages above say why")
    return code if code >= 0 else 128 - code


def _end_orphans(child: int) -> None:
    """Kill the processes that a dead child left, which are children of this one now."""
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    while left := [pid for pid in _children() if pid not in (child, tracker)]:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> list[int]:
    """The children of this process, on Linux; elsewhere none are known."""
    with suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
        return [int(pid) for pid in file.read().split()]
    return []


def _prctl(option: int, value: int) -> None:
    """Set an option of this process on Linux; elsewhere nothing is done."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _serve(tracker: int, arguments: Sequence[str]) -> None:
    """Run `vllm ARGUMENTS` in this process, with the resource tracker of the parent, and end when the parent dies."""
    _prctl(_PDEATHSIG, signal.SIGTERM)
    vars(resource_tracker._resource_tracker)["_fd"] = tracker  # what multiprocessing does in processes that it spawns
    sys.argv = ["vllm", *arguments]
    runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), json.loads(os.environ.pop(_ARGUMENTS)))

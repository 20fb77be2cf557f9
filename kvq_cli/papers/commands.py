"""Run `kvq` commands as processes, one at a time or several together."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO

from kvq_cli.errors import KvqError

#: Seconds that interrupted commands have to end by themselves.
GRACE = 5.0


class Commands:
    """Runs each `kvq` command in its own process, so that its memory is freed.

    report: called with each command line. together: how many run at the same time, from several threads. Of more than
    one, each line on stderr begins with what its command is for, what a command prints to stdout appears when it has
    ended, and commands without workers share the cores. stdout: file descriptor for what they print to standard output;
    None: this process's.
    """

    def __init__(self, report: Callable[[str], None], *, together: int = 1, stdout: int | None = None) -> None:
        self._report, self.together, self._stdout = report, together, stdout
        self._named = together > 1
        self._running: set[subprocess.Popen] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def run(self, words: Sequence[str], purpose: str, *, into: bool = False) -> str:
        """Run a command until it ends; returns what it printed to standard output where `into` asks for it.

        purpose: the target, and the artifact if the command calibrates one.
        KeyboardInterrupt if the command was interrupted, KvqError if it failed.
        """
        if self._stopped:
            raise KeyboardInterrupt
        self._report(f"{purpose}: $ kvq {shlex.join(words)}" if self._named else f"$ kvq {shlex.join(words)}")
        process = self._start(words, piped=into or self._named)
        relay = threading.Thread(target=_relay, args=(process.stderr, purpose)) if process.stderr else None
        try:
            if relay is not None:
                relay.start()
            printed = process.stdout.read() if process.stdout else ""
            code = process.wait()
        finally:
            if relay is not None:
                relay.join()
            with self._lock:
                self._running.discard(process)
        if printed and not into:
            self._print(printed)
        if code == 130 or (code and self._stopped):
            raise KeyboardInterrupt
        if code:
            command = "the same command without --fresh" if "--fresh" in words else "the same command"
            raise KvqError(f"kvq {words[0]} failed (exit code {code}); {command} continues from there")
        return printed if into else ""

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def stop(self) -> None:
        """End all running commands, which keep what they have finished; none can be started any more.

        Ctrl-C in a terminal has reached them, too: those that are still running after `GRACE` seconds are told to end.
        """
        with self._lock:
            self._stopped, running = True, list(self._running)
        until = time.monotonic() + GRACE
        for process in running:
            try:
                process.wait(max(0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.terminate()

    def _start(self, words: Sequence[str], piped: bool) -> subprocess.Popen:
        environment = dict(os.environ)
        if self._named and "--ray" not in words:
            # Processes that all use all cores wait for each other's threads. Workers have their own shares.
            environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.together)))
        with self._lock:
            if self._stopped:
                raise KeyboardInterrupt
            process = subprocess.Popen(
                [sys.executable, "-m", "kvq_cli", *words],
                stdout=subprocess.PIPE if piped else self._stdout,
                stderr=subprocess.PIPE if self._named else None,
                text=True,
                env=environment,
            )
            self._running.add(process)
        return process

    def _print(self, text: str) -> None:
        with self._lock:
            file = sys.stdout if self._stdout is None else sys.stderr
            print(text, end="", file=file, flush=True)


def _relay(lines: IO[str], name: str) -> None:
    for line in lines:
        print(f"{name}: {line}", end="", file=sys.stderr, flush=True)

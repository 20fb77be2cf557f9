"""Ctrl-C in a conversation: the first one stops the answer or discards the typed line, the second in a row leaves."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Interrupts:
    """Counts Ctrl-C, and raises KeyboardInterrupt only where that leaves nothing half done.

    While tokens are generated, the first Ctrl-C raises nothing: `stop` tells it after the token, so that the cache is
    consistent. It raises before the first token: a prefill can take long. While a message is typed, Ctrl-C is a key.
    """

    def __init__(self) -> None:
        self.count = 0
        self._raises: Callable[[], bool] = _never

    @property
    def leaves(self) -> bool:
        """Whether Ctrl-C was pressed twice in a row."""
        return self.count > 1

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the block, handle Ctrl-C, if it comes from a person at a terminal; ignore it behind the block: the
        program ends, and would print a traceback."""
        handled = threading.current_thread() is threading.main_thread() and sys.stdin.isatty()
        if not handled or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            yield
            return
        before = signal.signal(signal.SIGINT, self._handle)
        after: Any = before
        try:
            yield
            after = signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, after)

    @contextmanager
    def answering(self) -> Iterator[Callable[[], bool]]:
        """Inside the block, an answer is generated; yields `stop`, to be called after each token."""
        started = False

        def stop() -> bool:
            nonlocal started
            started = True
            return self.count > 0

        self._raises = lambda: self.leaves or not started
        try:
            yield stop
        finally:
            self._raises = _never

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.count += 1
        if self._raises() and not inside_import(frame):
            self._raises = _never  # once: what handles the exception is not interrupted
            raise KeyboardInterrupt


def inside_import(frame: FrameType | None) -> bool:
    """Whether the frame runs inside of an import: some libraries swallow KeyboardInterrupt there."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _never() -> bool:
    return False

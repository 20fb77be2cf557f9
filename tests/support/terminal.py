"""A program in a pseudo-terminal, typed to by a test: nothing is waited for without limit."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

CTRL_C, CTRL_D = "\x03", "\x04"
UP, RIGHT, HOME = "\x1b[A", "\x1b[C", "\x1b[H"
#: What the program prints when it reads keys: pasted text is to be marked.
PROMPT = "\x1b[?2004h"
#: Run first by the program: the pseudo-terminal becomes its controlling terminal, and Ctrl-C comes from there.
PROLOGUE = """
import fcntl, signal, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.default_int_handler)
"""


class Terminal:
    """Runs Python `code` in `folder`; `text` is what it printed so far. Fails when `limit` seconds are over."""

    def __init__(self, code: str, folder: Path, limit: float = 50, **environment: str) -> None:
        self._master, slave = pty.openpty()
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROLOGUE + code],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=folder,
            start_new_session=True,
            # No answers to prompt_toolkit's requests for the cursor's position: it would wait for them.
            env={**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **environment},
        )
        os.close(slave)
        self._deadline, self.text, self._seen = time.monotonic() + limit, "", 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait(10)
        os.close(self._master)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, text: str, seconds: float = 20) -> None:
        """Wait until `text` is printed, after what was expected before."""
        assert self._read_until(lambda: text in self.text[self._seen :], seconds), f"{text!r} missing in {self.text!r}"
        self._seen = self.text.index(text, self._seen) + len(text)

    def interrupt_until_end(self, seconds: float = 20) -> int:
        """Press Ctrl-C until the program ends; returns its exit code.

        Two in a row may be one signal, so that it is pressed again after a silence.
        """
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.type(CTRL_C)
            if self._read_until(self._has_ended, 1):
                break
        return self.exit_code(0.1)

    def exit_code(self, seconds: float = 20) -> int:
        """Wait for the end of the program."""
        assert self._read_until(self._has_ended, seconds), f"still running: {self.text!r}"
        self._read_until(lambda: False, 0.1)  # the rest of its output
        return self._process.returncode

    def _has_ended(self) -> bool:
        return self._process.poll() is not None

    def _read_until(self, condition: Callable[[], bool], seconds: float) -> bool:
        end = min(time.monotonic() + seconds, self._deadline)
        while not condition():
            left = end - time.monotonic()
            if left <= 0:
                return False
            if select.select([self._master], [], [], min(left, 0.1))[0]:
                try:
                    self.text += os.read(self._master, 4096).decode(errors="replace")
                except OSError:  # the program has closed its end
                    time.sleep(0.05)
        return True

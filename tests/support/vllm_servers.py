"""Servers of `kvq serve` in processes of their own, of which no process outlives the test."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
#: Seconds in which a server answers on a busy machine, and in which any request or exit is a hang.
START, HANG = 300, 90


def free_port() -> int:
    """A port below those that the system gives to processes that ask for any: none of them takes it meanwhile."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as listening, suppress(OSError):
            listening.bind(("127.0.0.1", port))
            return port


class Server:
    """`process` is the one that was started: it becomes vLLM's API server."""

    def __init__(self, process: subprocess.Popen, port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log

    def wait(self) -> None:
        """Until it answers; AssertionError with its last words if it does not."""
        end = time.monotonic() + START
        while True:
            with suppress(OSError), urllib.request.urlopen(self.url("/health"), timeout=5):
                return
            assert self.process.poll() is None and time.monotonic() < end, self.words()
            time.sleep(0.5)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    def words(self) -> str:
        """The end of what it printed."""
        return self.log.read_text(errors="replace")[-5000:]

    def open(self, body: bytes) -> Any:
        """The response to a completion request; urllib.error.HTTPError for an error."""
        headers = {"Content-Type": "application/json"}
        return urllib.request.urlopen(urllib.request.Request(self.url("/v1/completions"), body, headers), timeout=HANG)

    def status(self, body: bytes) -> int:
        try:
            with self.open(body) as answer:
                return answer.status
        except urllib.error.HTTPError as error:
            return error.code

    def answer(self, **body: Any) -> str:
        """The text of a greedy completion."""
        with self.open(json.dumps({"model": "reference", "temperature": 0, **body}).encode()) as answer:
            return json.load(answer)["choices"][0]["text"]

    def processes(self) -> list[psutil.Process]:
        """Those of its session that run, whoever their parent is now."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def named(self, name: str) -> list[psutil.Process]:
        """Its processes whose title has `name`: vLLM calls them VLLM::EngineCore, VLLM::Worker_TP0, ..."""
        return [process for process in self.processes() if name in " ".join(process.cmdline())]

    def shared_memory(self) -> set[Path]:
        """The files in /dev/shm that its processes have mapped."""
        found = set()
        for process in self.processes():
            with suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                found |= {
                    line.split()[5] for line in maps.splitlines() if " /dev/shm/" in line and "(deleted)" not in line
                }
        return set(map(Path, found))

    def until_gone(self) -> float:
        """Seconds until none of its processes runs; AssertionError if one stays."""
        begin = time.monotonic()
        while left := self.processes():
            assert time.monotonic() < begin + HANG, (left, self.words())
            time.sleep(0.2)
        return time.monotonic() - begin


@contextmanager
def serving(folder: Path, *words: str, ready: bool = True) -> Iterator[Server]:
    """`kvq serve` with these words and a small cache, run in `folder`; ready: wait until it answers."""
    port = free_port()
    log = folder / f"server-{port}.log"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "INFO"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    command = [sys.executable, "-m", "kvq_cli", "serve", *words, "--port", str(port), "--host", "127.0.0.1"]
    command += ["--kv-cache-memory-bytes", str(32 << 20), "--enforce-eager"]
    with log.open("w") as written:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=written, stderr=written, start_new_session=True
        )
    server = Server(process, port, log)
    try:
        if ready:
            server.wait()
        yield server
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(30)
        for left in server.processes():
            with suppress(psutil.Error):
                left.send_signal(signal.SIGKILL)
        process.wait(HANG)

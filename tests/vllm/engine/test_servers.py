"""A server that lm-eval asks, and whose processes are killed: requests get an error, and it ends; a new one answers.
One with a request in flight ends, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from vllm_servers import ROOT, serving

METHOD = ("--method", "kivi", "--bits", "2", "--set", "residual=32")
WORDS = (*METHOD, "--dtype", "float32", "--max-model-len", "1024")
PROMPT = "The old harbour lies where the river meets the sea, and its walls are of grey stone. " * 6
#: A request that takes much longer than a second.
IN_FLIGHT = {"model": "reference", "prompt": PROMPT, "max_tokens": 700, "ignore_eos": True}
#: Seconds in which a server ends after one of its processes was killed.
SOON = 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="module")
def server(folder):
    """The built-in model in a cache of 2 bits; the last test of this module kills it."""
    with serving(folder, *WORDS) as server:
        yield server


def test_lm_eval_has_the_answers_of_kvq_eval(server, tmp_path):
    """The same prompts of a task, answered by the server and in one process."""
    tool = ROOT / "tools" / "vllm" / "lm_eval_agreement.py"
    words = ["--url", server.url(""), "--model", "reference", "--methods", "kivi-2bit:residual=32", "--samples", "4"]
    done = subprocess.run([sys.executable, tool, *words], cwd=tmp_path, env=os.environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    cells = [cell.strip() for cell in done.stdout.splitlines()[-1].strip("| ").split("|")]
    assert cells[0] == "kivi-2bit:residual=32" and cells[1] == cells[2]
    assert cells[3:5] == ["4 of 4", "4 of 4"], done.stderr


def test_a_killed_engine_ends_the_server_and_a_new_one_answers_the_same(server, folder):
    expected = _kill(server, "EngineCore")
    with serving(folder, *WORDS) as again:
        assert again.answer(prompt=PROMPT, max_tokens=12) == expected
        shared = again.shared_memory()
        again.process.kill()  # the parent of all others
        again.until_gone()
    _check_gone(shared)


def test_a_killed_worker_of_two_ends_the_server(tmp_path):
    with serving(tmp_path, *WORDS, "--tensor-parallel-size", "2") as server:
        assert len(server.named("Worker_TP")) == 2
        _kill(server, "Worker_TP")


def test_a_request_that_takes_too_long_does_not_keep_a_server(tmp_path):
    with serving(tmp_path, *WORDS, "--shutdown-timeout", "1") as server:
        shared = server.shared_memory()
        with server.open(json.dumps({**IN_FLIGHT, "stream": True}).encode()) as stream:
            assert stream.readline().startswith(b"data: ")
            server.process.terminate()
            assert server.process.wait(SOON) == 1
        assert "was killed: requests in flight got no answer" in server.words()
        server.until_gone()
    _check_gone(shared)


def _kill(server, victim: str) -> str:
    """Kill a process while a request is in flight, and see the server end; returns its answer before."""
    expected = server.answer(prompt=PROMPT, max_tokens=12)
    assert expected.strip()
    shared = server.shared_memory()
    streamed = json.dumps({**IN_FLIGHT, "stream": True}).encode()
    with ThreadPoolExecutor() as pool, server.open(streamed) as stream:
        status = pool.submit(server.status, json.dumps(IN_FLIGHT).encode())
        assert stream.readline().startswith(b"data: ")  # it is being computed
        begin = time.monotonic()
        server.named(victim)[-1].kill()
        events = _events(stream)
        assert "error" in events[-1] and len(events) < 700
        assert status.result(SOON) == 500
    assert server.process.wait(SOON) == 1
    assert time.monotonic() - begin < SOON and "the server ended by itself" in server.words()
    server.until_gone()
    _check_gone(shared)
    return expected


def _events(stream) -> list[dict]:
    """The events of a stream until it ends or is cut."""
    lines = []
    with suppress(OSError):
        lines += [line for line in stream if line.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]


def _check_gone(files) -> None:
    """Python's resource tracker removes shared memory when the last process that knows of it has ended."""
    end = time.monotonic() + SOON
    while left := [file for file in files if file.exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.2)

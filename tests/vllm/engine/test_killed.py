"""A process of a running server is killed: requests get an error, the server ends, a new one answers the same."""

from __future__ import annotations

import json
import time
from contextlib import suppress

import pytest
from vllm_servers import serving

WORDS = ("--method", "kivi", "--bits", "2", "--set", "residual=32", "--max-model-len", "1024")
PROMPT = "The old harbour lies where the river meets the sea, and its walls are of grey stone. " * 6
#: Seconds in which a server ends after one of its processes was killed.
SOON = 30


@pytest.mark.parametrize(("ranks", "victim"), [(1, "EngineCore"), (2, "Worker")])
def test_a_killed_process_ends_the_server_and_a_new_one_answers_the_same(ranks, victim, tmp_path):
    words = (*WORDS, "--tensor-parallel-size", str(ranks))
    with serving(tmp_path, *words) as server:
        expected = server.answer(prompt=PROMPT, max_tokens=12)
        assert expected.strip()
        shared = server.shared_memory()
        in_flight = {"model": "reference", "prompt": PROMPT, "max_tokens": 700, "ignore_eos": True, "stream": True}
        with server.open(json.dumps(in_flight).encode()) as stream:
            assert stream.readline().startswith(b"data: ")  # it is being computed
            begin = time.monotonic()
            server.named(victim)[-1].kill()
            events = _events(stream)
        assert "error" in events[-1] and len(events) < 700
        assert server.process.wait(SOON) == 1
        assert time.monotonic() - begin < SOON and "the server ended by itself" in server.words()
        server.until_gone()
    _check_gone(shared)
    if ranks == 1:
        with serving(tmp_path, *words) as server:
            assert server.answer(prompt=PROMPT, max_tokens=12) == expected
            shared = server.shared_memory()
            server.process.kill()  # the parent of all others
            server.until_gone()
        _check_gone(shared)


def _check_gone(files) -> None:
    """Python's resource tracker removes shared memory when the last process that knows of it has ended."""
    end = time.monotonic() + SOON
    while left := [file for file in files if file.exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.2)


def _events(stream) -> list[dict]:
    """The events of a stream until it ends or is cut."""
    lines = []
    with suppress(OSError):
        lines += [line for line in stream if line.startswith(b"data: {")]
    return [json.loads(line.removeprefix(b"data: ")) for line in lines]

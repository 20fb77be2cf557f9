"""A process of a running server is killed: requests get an error, the server ends, a new one answers the same."""

from __future__ import annotations

import json
import time

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
            last = _last_words(stream)
            assert b"[DONE]" not in last
        code = server.process.wait(SOON)
        assert code != 0 and time.monotonic() - begin < SOON
        assert "died" in server.words().lower() or "dead" in server.words().lower()
        server.until_gone()
        assert not [file for file in shared if file.exists()]
    if ranks == 1:
        with serving(tmp_path, *words) as server:
            assert server.answer(prompt=PROMPT, max_tokens=12) == expected


def _last_words(stream) -> bytes:
    """The last event of a stream, or nothing where the connection is cut."""
    last = b""
    try:
        for line in stream:
            last = line if line.strip() else last
    except OSError:
        return b""
    return last

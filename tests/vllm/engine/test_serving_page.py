"""docs/SERVING.md: its commands, from calibration to an answer, and a server that bad requests leave alone."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
BLOCK = re.compile(r"(?:<!-- (?P<comment>[^\n]*?) -->\n)?```bash\n(?P<text>.*?)```", re.DOTALL)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def page_commands(port: int) -> list[tuple[str, list[str]]]:
    """(comment, words) of the commands of the page's first section."""
    text = (ROOT / "docs" / "SERVING.md").read_text(encoding="utf-8").partition("\n## ")[0]
    return [
        (found["comment"] or "run", shlex.split(found["text"].replace("8000", str(port))))
        for found in BLOCK.finditer(text)
    ]


def status_of(port: int, body: bytes) -> int:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture
def run(tmp_path):
    kvq = [sys.executable, "-m", "kvq_cli"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "INFO"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING")

    def start(words: list[str], **options):
        words = [*kvq, *words[1:]] if words[0] == "kvq" else words
        return subprocess.Popen(words, cwd=tmp_path, env=environment, text=True, **options)

    return start


def test_five_commands_lead_to_an_answer(run, tmp_path):
    port = free_port()
    (_, install), (_, calibrate), (_, serve), (_, wait), (_, client) = page_commands(port)
    assert install == ["pip", "install", "kvq-cli[vllm]"]
    assert run(calibrate, stderr=subprocess.DEVNULL).wait() == 0
    with open(tmp_path / "server.log", "w") as log:
        server = run([*serve, "--kv-cache-memory-bytes", "33554432", "--enforce-eager"], stdout=log, stderr=log)
    try:
        end = time.monotonic() + 300
        while subprocess.run(wait, capture_output=True).returncode:
            assert server.poll() is None and time.monotonic() < end, (tmp_path / "server.log").read_text()[-3000:]
            time.sleep(1)
        answer = json.loads(subprocess.run(client, capture_output=True, text=True, check=True).stdout)
        assert answer["usage"]["completion_tokens"] == 16 and answer["choices"][0]["text"].strip()

        good = {"model": "reference", "prompt": "The old harbour", "max_tokens": 4}
        long = {**good, "prompt": "word " * 5000}
        for body, status in ((b"{", 400), (json.dumps({**good, "model": "other"}).encode(), 404)):
            assert status_of(port, body) == status
        for bad in (long, {**good, "max_tokens": 10**6}, {**good, "temperature": -1}, {**good, "prompt": [10**6]}):
            assert status_of(port, json.dumps(bad).encode()) == 400
        assert status_of(port, json.dumps(good).encode()) == 200
    finally:
        server.terminate()
        server.wait(60)

"""docs/SERVING.md: its commands, from calibration to an answer, and a server that bad requests leave alone."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys

from vllm_servers import ROOT, serving

BLOCK = re.compile(r"(?:<!-- (?P<comment>[^\n]*?) -->\n)?```bash\n(?P<text>.*?)```", re.DOTALL)


def page_commands() -> list[list[str]]:
    """The words of the commands of the page's first section."""
    text = (ROOT / "docs" / "SERVING.md").read_text(encoding="utf-8").partition("\n## ")[0]
    return [shlex.split(found["text"], comments=True) for found in BLOCK.finditer(text)]


def test_five_commands_lead_to_an_answer(tmp_path):
    install, calibrate, serve, *asking = page_commands()
    assert install == ["pip", "install", ".[vllm]"]
    kvq = [sys.executable, "-m", "kvq_cli"]
    subprocess.run([*kvq, *calibrate[1:]], cwd=tmp_path, stderr=subprocess.DEVNULL, check=True)
    place = serve.index("--port")
    assert serve[:2] == ["kvq", "serve"] and serve.pop(place) and serve.pop(place) == "8000"
    with serving(tmp_path, *serve[2:], ready=False) as server:
        wait, client = ([word.replace("8000", str(server.port)) for word in words] for words in asking)
        server.wait()
        assert subprocess.run(wait, capture_output=True).returncode == 0
        answer = json.loads(subprocess.run(client, capture_output=True, text=True, check=True).stdout)
        assert answer["usage"]["completion_tokens"] == 16 and answer["choices"][0]["text"].strip()

        good = {"model": "reference", "prompt": "The old harbour", "max_tokens": 4}
        long = {**good, "prompt": "word " * 5000}
        for body, status in ((b"{", 400), (json.dumps({**good, "model": "other"}).encode(), 404)):
            assert server.status(body) == status
        for bad in (long, {**good, "max_tokens": 10**6}, {**good, "temperature": -1}, {**good, "prompt": [10**6]}):
            assert server.status(json.dumps(bad).encode()) == 400
        assert server.status(json.dumps(good).encode()) == 200

        slow = {**good, "max_tokens": 100, "ignore_eos": True, "stream": True}
        with server.open(json.dumps(slow).encode()) as stream:
            assert stream.readline().startswith(b"data: ")
            server.process.terminate()
            assert stream.read().endswith(b"data: [DONE]\n\n")  # a request in flight is finished
        assert server.process.wait(60) == 0
        server.until_gone()

"""Load test: `kvq serve` under vLLM's own `bench serve`, one server per method with the same memory for the cache.

    .venv/vllm/bin/python tools/vllm/load.py --model smollm2 --dtype bfloat16 --cache 96MiB \
        --methods fp16 kivi-2bit:residual=32 turboquant-2bit

Prints requests per minute, output tokens per second and preemptions of each method, and the blocks of its server. All
requests arrive at once. Times on a machine without a GPU are of vLLM's scheduler and kvq's references in PyTorch; the
order of the numbers of preemptions is that of any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from kvq_cli.evaluation.formats import markdown
from kvq_cli.models import model_source
from kvq_cli.units import parse_bytes


@contextmanager
def server(words: list[str], port: int, log: Path, timeout: float):
    """`kvq serve` with these words, answering on `port` (0: a free one); gives its address. RuntimeError with its last
    output if it does not answer."""
    port = port or free_port()
    command = [sys.executable, "-m", "kvq_cli", "serve", *words, "--port", str(port), "--enforce-eager"]
    with log.open("w") as written:
        process = subprocess.Popen(command, stdout=written, stderr=written)
    try:
        end = time.monotonic() + timeout
        while True:
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError(f"no server: {log.read_text()[-3000:]}") from None
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(60)


def free_port() -> int:
    """A port on which no process listens."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def method_options(method: str) -> list[str]:
    """The flags of kvq for NAME-BITSbit:OPTION=VALUE."""
    name, *pairs = method.split(":")
    name, _, bits = name.partition("-")
    options = ["--method", name, *(["--bits", bits.removesuffix("bit")] if bits else [])]
    return options + [word for pair in pairs for word in ("--set", pair)]


def preemptions(url: str) -> int:
    """vLLM's counter of preempted requests."""
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        text = answer.read().decode()
    return int(sum(float(number) for number in re.findall(r"^vllm:num_preemptions_total\{.*?\} (\S+)$", text, re.M)))


def measure(method: str, arguments: argparse.Namespace, folder: Path) -> list[str]:
    """A row of the table."""
    options = [*method_options(method), "--dtype", arguments.dtype, "--max-num-batched-tokens", str(arguments.step)]
    cache = ["--kv-cache-memory-bytes", str(parse_bytes(arguments.cache, "--cache"))]
    words = ["--model", arguments.model, *options, *cache, "--max-model-len", str(arguments.length)]
    log, answer = folder / "server.log", folder / "answer.json"
    with server([*words, "--served-model-name", "model"], arguments.port, log, arguments.timeout) as url:
        subprocess.run(
            [
                *(str(Path(sys.executable).with_name("vllm")), "bench", "serve", "--base-url", url),
                *("--model", "model", "--tokenizer", model_source(arguments.model), "--dataset-name", "random"),
                *("--random-input-len", str(arguments.input), "--random-output-len", str(arguments.output)),
                *("--random-range-ratio", "0.5", "--num-prompts", str(arguments.requests), "--ignore-eos"),
                *("--save-result", "--result-dir", str(folder), "--result-filename", answer.name),
            ],
            check=True,
            stdout=sys.stderr,
        )
        preempted = preemptions(url)
    result = json.loads(answer.read_text())
    blocks = re.search(r"KV cache size: ([\d,]+) tokens", log.read_text())
    return [
        method,
        blocks[1] if blocks else "-",
        f"{result['completed']} of {arguments.requests}",
        f"{60 * result['completed'] / result['duration']:.1f}",
        f"{result['output_throughput']:.1f}",
        str(preempted),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="auto", help="of the model")
    parser.add_argument("--methods", nargs="+", default=["fp16", "kivi-2bit"], help="NAME-BITSbit:OPTION=VALUE")
    parser.add_argument("--cache", default="96MiB", help="memory of the cache")
    parser.add_argument("--step", type=int, default=256, help="tokens of all requests that a step computes at most")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--input", type=int, default=300, help="tokens of a prompt, on average")
    parser.add_argument("--output", type=int, default=100, help="new tokens of a request, on average")
    parser.add_argument("--length", type=int, default=1024, help="longest context")
    parser.add_argument("--port", type=int, default=0, help="of the server; 0: a free one")
    parser.add_argument("--timeout", type=float, default=300, help="seconds until a server answers")
    arguments = parser.parse_args()
    os.environ.setdefault("KVQ_VLLM_CPU", "1")
    with TemporaryDirectory() as folder:
        rows = [measure(method, arguments, Path(folder)) for method in arguments.methods]
    columns = ["method", "tokens in blocks", "finished", "requests a minute", "output tokens a second", "preemptions"]
    print(markdown(columns, rows))


if __name__ == "__main__":
    main()

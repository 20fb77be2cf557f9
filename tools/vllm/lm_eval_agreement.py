"""Scores of lm-eval through a server of `kvq serve` beside those of `kvq eval`: the same prompts, greedy.

    .venv/vllm/bin/python tools/vllm/lm_eval_agreement.py --model smollm2 --methods fp16 kivi-2bit:residual=32

The task is one of GSM8K's kind, local and short: problems of one step, two worked examples before each, the answer
behind `####`. lm-eval's own command asks the server through its model `local-completions`; `kvq eval` computes the same
prompts with the same method. Prints both scores with their standard errors, and how many samples have the same text.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from load import method_options, server

from kvq_cli.evaluation.formats import markdown
from kvq_cli.models import model_source

TASK = """
task: steps
dataset_path: json
dataset_kwargs: {{data_files: {{train: {folder}/train.jsonl, test: {folder}/test.jsonl}}}}
training_split: train
fewshot_split: train
fewshot_config: {{sampler: first_n}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_target: " {{{{answer}}}}"
num_fewshot: 2
generation_kwargs: {{until: ["Question:", "\\n\\n"], max_gen_toks: {tokens}, do_sample: false, temperature: 0.0}}
filter_list:
  - name: strict-match
    filter: [{{function: regex, regex_pattern: "#### (\\\\d+)"}}, {{function: take_first}}]
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true, regexes_to_ignore: ["(?s).*#### "]}}
metadata: {{version: 1.0}}
"""
METRIC = "exact_match,strict-match"
#: (question, operation): {a} and {b} are drawn.
PROBLEMS = (
    ("{name} has {a} {things} and buys {b} more. How many {things} does {name} have now?", "+"),
    ("{name} had {a} {things} and gave away {b} of them. How many {things} are left?", "-"),
    ("{name} packs {b} boxes with {a} {things} in each box. How many {things} are in all boxes together?", "*"),
    ("There are {a} {things} on one table and {b} {things} on another. How many {things} are there in all?", "+"),
)
NAMES = ("Tom", "Anna", "Ben", "Maria", "Paul", "Lucy", "Sam", "Nora")
THINGS = ("apples", "books", "pencils", "eggs", "stones", "flowers", "coins", "tickets")


class Sample(NamedTuple):
    """A prompt's hash, the text that the model continued it with, and its score."""

    prompt: str
    text: str
    score: float


def problems(count: int, seed: int) -> list[dict[str, str]]:
    """`count` problems of one step with worked answers as GSM8K has them."""
    draw, rows = random.Random(seed), []
    for i in range(count):
        text, sign = PROBLEMS[i % len(PROBLEMS)]
        a, b = draw.randrange(5, 13), draw.randrange(2, 5)
        result = {"+": a + b, "-": a - b, "*": a * b}[sign]
        question = text.format(name=draw.choice(NAMES), things=draw.choice(THINGS), a=a, b=b)
        rows.append({"question": question, "answer": f"{a} {sign} {b} = {result}.\n#### {result}"})
    return rows


def write_task(folder: Path, count: int, tokens: int) -> Path:
    """The task's file; its data lie beside it."""
    for split, rows in (("train", problems(2, 1)), ("test", problems(count, 2))):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "steps.yaml"
    path.write_text(TASK.format(folder=folder, tokens=tokens))
    return path


def prompt_hash(arguments: Sequence[Any]) -> str:
    """As `kvq eval` writes it for a sample of one request."""
    return hashlib.sha256(json.dumps([list(arguments)], default=str).encode()).hexdigest()


def through_server(arguments: argparse.Namespace, method: str, task: Path, folder: Path) -> list[Sample]:
    """Samples of lm-eval's command, which asks the server at `--url`, or one that is started for the method."""
    if arguments.url is not None:
        return ask(arguments, arguments.url, task, folder)
    words = ["--model", arguments.model, *method_options(method), "--dtype", arguments.dtype]
    words += ["--max-model-len", str(arguments.length), "--kv-cache-memory-bytes", str(arguments.cache << 20)]
    with server(words, arguments.port, folder / "server.log", arguments.timeout) as url:
        return ask(arguments, url, task, folder)


def ask(arguments: argparse.Namespace, url: str, task: Path, folder: Path) -> list[Sample]:
    """Samples of lm-eval's command."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        model = {"model": json.load(answer)["data"][0]["id"]}
    # Prompts are sent as text: the server's tokenizer adds what the model's own adds.
    model |= {"base_url": f"{url}/v1/completions", "tokenizer": model_source(arguments.model)}
    model |= {"tokenizer_backend": "huggingface", "tokenized_requests": "False", "num_concurrent": "4"}
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--tasks", task.stem]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in model.items())]
    command += ["--include_path", str(task.parent), "--log_samples", "--output_path", str(folder / "client")]
    quietly(command, folder)
    (written,) = (folder / "client").rglob("samples_*.jsonl")
    samples = {}
    for row in map(json.loads, written.read_text().splitlines()):
        request = row["arguments"]["gen_args_0"]
        key = prompt_hash((request["arg_0"], request["arg_1"]))
        samples[row["doc_id"]] = Sample(key, row["resps"][0][0], float(row["exact_match"]))
    return [samples[i] for i in sorted(samples)]


def through_eval(arguments: argparse.Namespace, method: str, task: Path, folder: Path) -> list[Sample]:
    """Samples of `kvq eval`, whose model runs in its own process."""
    command = [sys.executable, "-m", "kvq_cli", "eval", "--model", arguments.model, "--dtype", arguments.dtype]
    command += [*method_options(method), "--task", f"lm_eval:{task}", "--no-chat-template", "--prefill", "compressed"]
    quietly([*command, "--out", str(folder / "eval"), "--batch-size", "1"], folder)
    (written,) = (folder / "eval").rglob("*steps*.jsonl")
    rows = sorted(map(json.loads, written.read_text().splitlines()[1:]), key=lambda row: row["index"])
    return [Sample(row["prompt_sha256"], row["responses"][0], float(row["scores"][METRIC])) for row in rows]


def quietly(command: list[str], folder: Path) -> None:
    """Run a command; RuntimeError with the end of its output if it fails."""
    # The data are two local files; their copies are left in the folder, too.
    environment = {**os.environ, "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:4])} failed: {done.stdout[-3000:]}")


def score(samples: Sequence[Sample]) -> str:
    """The mean in percent, and its standard error."""
    count, mean = len(samples), sum(sample.score for sample in samples) / len(samples)
    error = (mean * (1 - mean) / max(1, count - 1)) ** 0.5
    return f"{100 * mean:.1f} +- {100 * error:.1f}"


def measure(method: str, arguments: argparse.Namespace) -> list[str]:
    """A row of the table. RuntimeError unless both saw the same prompts."""
    begin = time.monotonic()
    with TemporaryDirectory() as name:
        folder = Path(name)
        task = write_task(folder, arguments.samples, arguments.tokens)
        served, evaluated = (run(arguments, method, task, folder) for run in (through_server, through_eval))
    if [sample.prompt for sample in served] != [sample.prompt for sample in evaluated]:
        raise RuntimeError("the prompts of lm-eval's command and of kvq eval are different")
    pairs = list(zip(served, evaluated, strict=True))
    for one, other in pairs:
        if one.text != other.text:
            print(f"{method}: server {one.text!r}, kvq eval {other.text!r}", file=sys.stderr)
    texts, scores = (sum(getattr(a, name) == getattr(b, name) for a, b in pairs) for name in ("text", "score"))
    of = f"of {len(pairs)}"
    return [
        method,
        score(served),
        score(evaluated),
        f"{scores} {of}",
        f"{texts} {of}",
        f"{time.monotonic() - begin:.0f}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="float32", help="of the model")
    parser.add_argument("--methods", nargs="+", default=["fp16", "kivi-2bit"], help="NAME-BITSbit:OPTION=VALUE")
    parser.add_argument("--samples", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=24, help="of an answer, at most")
    parser.add_argument("--cache", type=int, default=128, help="MiB of the server's cache")
    parser.add_argument("--length", type=int, default=1024, help="longest context")
    parser.add_argument("--url", help="of a server that runs; default: one is started for each method")
    parser.add_argument("--port", type=int, default=0, help="of the server; 0: a free one")
    parser.add_argument("--timeout", type=float, default=300, help="seconds until a server answers")
    arguments = parser.parse_args()
    os.environ.setdefault("KVQ_VLLM_CPU", "1")
    rows = [measure(method, arguments) for method in arguments.methods]
    print(markdown(["method", "served", "kvq eval", "same score", "same text", "seconds"], rows))


if __name__ == "__main__":
    main()

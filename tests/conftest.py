"""What all tests share: no network, one deterministic hypothesis profile, and `kvq` as a function."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

# Set before any library reads them: a test that would go to the network must fail here as it would there.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# KVQ_TEST_PTX=sm_90: tests of kernels execute what they are compiled to for that GPU (see tests/kernels/ptx), on
# tensors in ordinary memory, also where there is a GPU.
if "KVQ_TEST_PTX" in os.environ:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

try:
    import hypothesis
except ModuleNotFoundError:  # on a machine with a GPU: tests that need it are not among those that run there
    hypothesis = None

# Importing and collecting leave a million objects: looking for garbage among them again and again takes seconds.
gc.disable()

# Kernels run in Triton's interpreter where there is no GPU, which is settled when Triton is imported: transformers'
# models do that, too.
if not torch.cuda.is_available() and "KVQ_TEST_PTX" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"
    from interpreter import omit_dropped_work

    omit_dropped_work()

# So that processes that tests start find this checkout, also where it is not installed.
ROOT = Path(__file__).parents[1]
_own = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _own))

if hypothesis is not None:
    hypothesis.settings.register_profile("kvq", deadline=None, derandomize=True, max_examples=50)
    hypothesis.settings.load_profile("kvq")


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def texts_once() -> Iterator[None]:
    """Tokenize a long text once with each tokenizer, and split a haystack into sentences once: evaluations share them,
    and spend most of their time there with models of two layers."""
    from kvq_cli.data import texts
    from kvq_cli.evaluation.ruler import haystack

    tokens, sentences, found = texts._tokens, haystack._sentences, {}

    def tokens_once(tokenizer, text: str):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if len(text) < 1_000 or backend is None:
            return tokens(tokenizer, text)
        key = hash((backend.to_str(), text))
        if key not in found:
            found[key] = tokens(tokenizer, text)
        return found[key].clone()

    def sentences_once(words: list[str]):
        key = hash(tuple(words))
        if key not in found:
            found[key] = sentences(words)
        return found[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(texts, "_tokens", tokens_once)
        patch.setattr(haystack, "_sentences", sentences_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """Do not wait for the disk: no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def default_sigint() -> Iterator[None]:
    """As in a terminal: a runner in the background ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def kvq(tmp_path, monkeypatch) -> Callable:
    """`kvq("eval", "--help")` runs the command in this process, in an empty folder; gives exit_code, stdout, stderr."""
    from typer.testing import CliRunner

    from kvq_cli.cli.app import app

    monkeypatch.chdir(tmp_path)

    def run(*arguments: object, input: str = ""):
        return CliRunner().invoke(app, [str(a) for a in arguments], input=input, prog_name="kvq")

    return run


@pytest.fixture
def kvq_process(tmp_path) -> Callable:
    """`kvq_process("chat")` starts the command as a process of its own, in an empty folder; returns when its entry
    point is imported. Until then Python itself answers Ctrl-C."""

    def start(*arguments: object) -> subprocess.Popen:
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        # A runner in the background ignores Ctrl-C, and its children inherit that.
        code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)"
        code += f"; sys.argv = {['kvq', *map(str, arguments)]!r}; from kvq_cli.cli import main"
        words = [sys.executable, "-c", f"{code}; print('up', flush=True); main()"]
        process = subprocess.Popen(words, cwd=tmp_path, text=True, **pipes)
        assert process.stdout.readline() == "up\n"
        return process

    return start


@pytest.fixture
def fails(kvq) -> Callable:
    """`fails("eval", "--bits", 9, code=2, says="bits")`: that exit code and one line on stderr that says it."""

    def check(*arguments: object, code: int, says: str, input: str = "") -> None:
        result = kvq(*arguments, input=input)
        assert result.exit_code == code, result.output
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("kvq: error: ")
        assert says in lines[0], lines[0]
        assert result.stdout == ""

    return check

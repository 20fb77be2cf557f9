"""`kvq serve` around a server that dies, is asked to stop, or loses its parent; the server is a stand-in for vLLM."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

#: A server with a child of its own and shared memory: it ends as vLLM does, with code 0 in any case.
VLLM = """
import multiprocessing, os, signal, sys, time
from multiprocessing import shared_memory

def engine():
    time.sleep(600)

if __name__ == "__main__":
    memory = shared_memory.SharedMemory(create=True, size=1000)
    process = multiprocessing.get_context("spawn").Process(target=engine)
    process.start()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None if sys.argv[1:] == ["hang"] else os._exit(0))
    print(os.getpid(), process.pid, memory.name, *sys.argv, flush=True)
    time.sleep(600 if sys.argv[1:] != ["die"] else 0.1)
    os._exit(0)
"""
MAIN = "import sys; from kvq_cli.vllm.supervise import supervise; sys.exit(supervise(sys.argv[2:], float(sys.argv[1])))"
SOON = 30

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are adopted and tied to parents on Linux")


@pytest.fixture
def start(tmp_path):
    """`start("die")` -> (the process of `kvq serve`, processes of the server, its shared memory)."""
    main = tmp_path / "vllm" / "entrypoints" / "cli" / "main.py"
    main.parent.mkdir(parents=True)
    main.write_text(VLLM)
    for folder in (main.parent, *main.parent.parents[:2]):
        (folder / "__init__.py").touch()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])}
    running = []

    def run(*words, patience=600):
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, str(patience), *words], env=environment, cwd=tmp_path, **pipes
        )
        running.append(process)
        server, engine, memory, *arguments = process.stdout.readline().split()
        assert arguments[1:] == list(words)
        return process, [Path("/proc", server), Path("/proc", engine)], Path("/dev/shm", memory)

    yield run
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=SOON)


def until_gone(*paths: Path) -> None:
    """A process that ended and waits for its parent counts as gone."""
    end = time.monotonic() + SOON
    while left := [path for path in paths if path.exists() and not _is_zombie(path)]:
        assert time.monotonic() < end, left
        time.sleep(0.05)


def _is_zombie(path: Path) -> bool:
    try:
        return (path / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return False


def test_a_server_that_dies_is_an_error_and_leaves_nothing(start):
    process, server, memory = start("die")
    _, messages = process.communicate(timeout=SOON)
    assert process.returncode == 1 and "the server ended by itself (vLLM's exit code: 0)" in messages
    until_gone(*server, memory)


def test_a_server_that_is_asked_to_stop_ends_with_its_own_code(start):
    process, server, memory = start("serve", "model")
    process.terminate()
    assert process.wait(SOON) == 0
    until_gone(*server, memory)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_server_that_does_not_end_is_killed(start, number):
    process, server, memory = start("hang", patience=0.3)
    process.send_signal(number)
    _, messages = process.communicate(timeout=SOON)
    assert process.returncode == 1 and "had not ended 0.3 s after it was asked to, and was killed" in messages
    until_gone(*server, memory)


def test_keys_are_hidden_from_other_users(start):
    """`ps` shows them a process's arguments, but not its environment; the engine gets neither."""
    words = ("serve", "model", "--api-key", "KEY", "KEY2", "--hf-token=KEY", "--port", "1")
    process, (server, engine), _ = start(*words)  # which checks that the server gets the words
    shown = (server / "cmdline").read_text().split("\0")[-8:-1]
    assert shown == ["model", "--api-key", "***", "***", "--hf-token=***", "--port", "1"]
    assert "KEY" not in (engine / "cmdline").read_text() + (engine / "environ").read_text()


def test_a_killed_engine_is_not_left_by_a_killed_server(start):
    process, server, memory = start("serve", "model")
    os.kill(int(server[0].name), signal.SIGKILL)
    assert process.wait(SOON) == 1
    until_gone(*server, memory)


def test_a_server_ends_with_its_parent(start):
    process, server, memory = start("serve", "model")
    process.kill()
    until_gone(server[0])
    os.kill(int(server[1].name), signal.SIGKILL)  # vLLM's own engine ends with its server
    until_gone(*server, memory)

"""Commands of targets, one at a time and together."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvq_cli.errors import KvqError
from kvq_cli.papers import commands
from kvq_cli.papers.commands import Commands


@pytest.fixture(autouse=True)
def programs(monkeypatch, tmp_path):
    """The words of a command are a Python program."""
    script = tmp_path / "kvq_cli.py"
    script.write_text("import sys; exec(sys.argv[1])")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("together", [1, 2])
def test_output_errors_and_interrupts(together, capfd):
    reported = []
    running = Commands(reported.append, together=together)
    assert running.run(["import sys; print(1); print('note', file=sys.stderr)"], "table", into=True) == "1\n"
    assert running.run(["print(2)"], "table") == ""
    said = capfd.readouterr()
    assert said.out == "2\n" and said.err == ("table: note\n" if together > 1 else "note\n")
    with pytest.raises(KvqError, match=r"failed \(exit code 3\)"):
        running.run(["sys.exit(3)"], "table")
    with pytest.raises(KeyboardInterrupt):
        running.run(["sys.exit(130)"], "table")
    assert reported[1] == ("table: $ kvq 'print(2)'" if together > 1 else "$ kvq 'print(2)'")


def test_together_share_the_cores_unless_told_otherwise(monkeypatch):
    """Workers are not limited: their number of threads follows from the cluster."""
    monkeypatch.setattr("os.cpu_count", lambda: 6)
    program = ["import os; print(os.environ.get('OMP_NUM_THREADS'))"]
    for given, alone, together, on_workers in ((None, "None", "3", "None"), ("2", "2", "2", "2")):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        if given is not None:
            monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert Commands(print).run(program, "x", into=True) == f"{alone}\n"
        two = Commands(print, together=2)
        assert two.run(program, "x", into=True) == f"{together}\n"
        assert two.run([*program, "--ray", "auto"], "x", into=True) == f"{on_workers}\n"


def test_stop_ends_all_commands_and_starts_no_more(monkeypatch):
    monkeypatch.setattr(commands, "GRACE", 0.5)
    running, started = Commands(lambda _: None, together=2), threading.Barrier(3)
    begun = time.monotonic()

    def run(number: int) -> str:
        started.wait()
        return running.run(["import time; time.sleep(60)"], str(number))

    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(run, number) for number in range(2)]
        started.wait()
        while len(running._running) < 2:
            time.sleep(0.01)
        running.stop()
        for each in waiting:
            with pytest.raises(KeyboardInterrupt):
                each.result()
    assert time.monotonic() - begun < 30
    with pytest.raises(KeyboardInterrupt):
        running.run(["print(1)"], "x")

"""Commands of targets, one at a time and together."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvq_cli.cli import reproduce
from kvq_cli.cli.output import Output
from kvq_cli.cli.reproduce import _make_all, _Runner
from kvq_cli.errors import KvqError
from kvq_cli.files import write_json
from kvq_cli.papers import commands, run
from kvq_cli.papers.commands import Commands
from kvq_cli.papers.run import DONE, RECORD, TO_DO, current_record, state
from kvq_cli.papers.targets import REFERENCE, target


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


@pytest.mark.parametrize(
    ("flags", "says"), [([], "the same command"), (["--fresh"], "the same command without --fresh")]
)
def test_errors_tell_what_continues(flags, says):
    with pytest.raises(KvqError, match=rf"failed \(exit code 3\); {says} continues from there"):
        Commands(lambda _: None).run(["sys.exit(3)", *flags], "table")


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
    reported, started = [], threading.Barrier(3)
    running = Commands(reported.append, together=2)
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
    assert len(reported) == 2  # it does not say that it runs a third one


@pytest.fixture
def runner(tmp_path):
    """Runs targets, two at a time, with results below `tmp_path`."""
    running = Commands(lambda _: None, together=2)
    return _Runner(Output(quiet=True), running, REFERENCE, False, tmp_path, tmp_path, None, stop=True)


def test_the_error_of_the_target_that_failed_is_raised(runner, monkeypatch):
    """The first target, which it stops, ends as if interrupted; the third one is not begun."""

    def run_target(entry, model, running, *_):
        if entry.id == failing:
            while not running._running:
                time.sleep(0.01)
            running.run(["sys.exit(3)"], entry.id)
        write_json(entry.folder(REFERENCE, runner.root) / RECORD, {})
        running.run(["import time; time.sleep(60)"], entry.id)

    names = slow, failing, waiting = "table-temporalkv-1", "table-temporalkv-3", "figure-temporalkv-12"
    monkeypatch.setattr(commands, "GRACE", 0.5)
    monkeypatch.setattr(run, "run_target", run_target)
    with pytest.raises((KvqError, KeyboardInterrupt), match=r"failed \(exit code 3\)"):
        _make_all(runner, [target(name) for name in names])
    assert state(target(slow), REFERENCE, runner.root) != TO_DO
    assert state(target(waiting), REFERENCE, runner.root) == TO_DO


def test_calibrations_of_a_target_run_two_at_a_time(runner, monkeypatch, tmp_path):
    """The first two wait for each other; one that fails stops those that have not begun."""
    program = """
import pathlib, time
pathlib.Path({own!r}).touch()
while not pathlib.Path({other!r}).exists():
    time.sleep(0.01)
"""
    missing = {own: [program.format(own=own, other=other)] for own, other in (("a", "b"), ("b", "a"))}
    missing |= {"fails": ["sys.exit(3)"], **dict.fromkeys(("waits", "too"), ["import time; time.sleep(1)"])}
    missing["last"] = ["open('last', 'w')"]
    monkeypatch.setattr(reproduce, "_calibrations", lambda *_: missing)
    with pytest.raises(KvqError, match=r"failed \(exit code 3\)"):
        runner.make(target("table-temporalkv-4"), 1, 1)
    assert {"a", "b"} < {path.name for path in tmp_path.iterdir()} and not (tmp_path / "last").exists()


def test_targets_of_one_study_run_it_once(runner, monkeypatch):
    """Two at a time, and in the order in which they are named."""

    def run_target(entry, *_):
        ran.append(entry.analyze)
        time.sleep(0.2)  # enough for another target to begin
        write_json(entry.result(REFERENCE, runner.root), {})
        write_json(entry.folder(REFERENCE, runner.root) / RECORD, current_record(entry, REFERENCE))

    names, ran = ["figure-temporalkv-12", "figure-temporalkv-13", "table-temporalkv-3", "figure-temporalkv-14"], []
    monkeypatch.setattr(run, "run_target", run_target)
    made = _make_all(runner, [target(name) for name in names])
    assert sorted(ran) == ["entropy", "outliers"]
    assert [(each["id"], each["state"]) for each in made] == [(name, DONE) for name in names]
    assert [each["seconds"] is None for each in made] == [False, True, False, True]

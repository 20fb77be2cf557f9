"""Running targets: failures, interrupts, and resumption with the same files as an uninterrupted run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvq_cli.errors import KvqError
from kvq_cli.files import write_json
from kvq_cli.papers.commands import Commands
from kvq_cli.papers.run import DONE, PARTLY, RECORD, current_record, run_target, state
from kvq_cli.papers.targets import REFERENCE, target

TINY = "--samples 3 --seqlen 192 --set sinks=4 --set recent=4"


def test_a_failing_command_leaves_the_target_unfinished(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry, reported = replace(target("table-temporalkv-13"), run="bits --papers --nonsense"), []
    with pytest.raises(KvqError, match=r"kvq bits failed \(exit code 2\)"):
        run_target(entry, REFERENCE, Commands(reported.append))
    assert reported == ["$ kvq bits --papers --nonsense"]
    assert state(entry, REFERENCE) == PARTLY


@pytest.mark.slow
def test_the_output_of_a_command_is_the_result(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    entry = replace(target("table-temporalkv-13"), run="bits --shapes tiny --method kivi --json")
    run_target(entry, REFERENCE, Commands(lambda text: None))
    assert json.loads(entry.result(REFERENCE).read_text())["methods"][0]["method"] == "kivi-2bit"
    assert state(entry, REFERENCE) == DONE
    assert state(replace(entry, run="bits --shapes tiny --json"), REFERENCE) == PARTLY


def test_json_is_one_document_and_tables_of_commands_go_to_stderr(tmp_path):
    """A command that prints a table, in the place of `kvq eval`; the process has descriptors of its own."""
    code = """
import sys
from pathlib import Path
from kvq_cli.cli import main
from kvq_cli.papers import run
from kvq_cli.papers.targets import Target

Target.command = lambda self, model, root=None, store=None: ["bits", "--shapes", "tiny"]
Target.result = lambda self, model, root=None: Path("result.json")
Target.calibrated = lambda self, model: []
run.write_report = run.compact_file = lambda *arguments: None
run.current_record = lambda target, model: {"files": {}, "artifacts": {}, "finished": True}
sys.argv = ["kvq", "reproduce", "table-temporalkv-6", "--json"]
main()
"""
    (tmp_path / "result.json").write_text("{}")
    entry = target("table-temporalkv-6")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [found] = json.loads(done.stdout)
    assert found["seconds"] > 0 and found["state"] == DONE, found
    assert (found["id"], found["folder"]) == (entry.id, str(entry.folder(REFERENCE)))
    assert "nominal" in done.stderr  # a column of the table


def test_results_in_a_clone_without_artifacts_count_as_done(tmp_path, monkeypatch):
    """Artifacts with options are not in the repository; with another artifact the results would be others."""
    monkeypatch.chdir(tmp_path)
    entry, root = target("table-temporalkv-6"), tmp_path / "results"
    folder, name = entry.folder(REFERENCE, root), "kvquant-2bit-outliers-0.0"
    write_json(folder / RECORD, {**current_record(entry, REFERENCE), "artifacts": {name: "abc"}})
    assert state(entry, REFERENCE, root) == PARTLY  # without its result
    write_json(entry.result(REFERENCE, root), {})
    assert state(entry, REFERENCE, root) == DONE
    config = Path("artifacts/reference") / name / "config.json"
    write_json(config, {"checksum": "abc"})
    assert state(entry, REFERENCE, root) == DONE
    write_json(config, {"checksum": "def"})
    assert state(entry, REFERENCE, root) == PARTLY


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_files(tmp_path):
    def start(root):
        words = ["reproduce", "table-innerq-2", "--options", f"--task perplexity {TINY}"]
        words += ["--out", root / "results", "--store", root / "store"]
        return subprocess.Popen(
            [sys.executable, "-m", "kvq_cli", *map(str, words)],
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def samples(root):
        return sum(len(path.read_text().splitlines()) - 1 for path in (root / "store").glob("*/*.jsonl"))

    once, twice = tmp_path / "once", tmp_path / "twice"
    assert start(once).wait() == 0
    killed = start(twice)
    while samples(twice) < 2 and killed.poll() is None:
        time.sleep(0.005)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    assert 2 <= samples(twice) < samples(once) == 12
    folder = target("table-innerq-2").folder(REFERENCE, twice / "results")
    assert not json.loads((folder / RECORD).read_text())["finished"] and not (folder / "comparison.json").exists()
    assert start(twice).wait() == 0
    other = target("table-innerq-2").folder(REFERENCE, once / "results")
    for name in ("comparison.json", "differences.json", "table.md", RECORD):
        assert (folder / name).read_text() == (other / name).read_text(), name

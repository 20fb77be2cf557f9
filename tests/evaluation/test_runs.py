"""Records of runs, what a result folder shows, and runs at the same time that share samples."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from run_records import without_run

from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.errors import NotFiniteError
from kvq_cli.evaluation.compared_methods import compared_methods
from kvq_cli.evaluation.runner import evaluate
from kvq_cli.evaluation.runs import load_runs, shown_results
from kvq_cli.evaluation.sample_log import SampleLog, read_records
from kvq_cli.evaluation.settings import EvaluationSettings
from kvq_cli.methods.registry import build

KIVI = {residual: build("kivi", bits=2, residual=residual) for residual in (32, 64)}


@pytest.fixture
def run(loaded, tmp_path):
    """`run(chosen, limit, command)`: evaluate perplexity of windows of 96 tokens into one folder."""

    def start(chosen, limit, command="kvq eval", **changes):
        settings = EvaluationSettings(**{"tasks": ["perplexity"], "seqlens": [96], "samples": limit, **changes})
        return evaluate(loaded, compared_methods(chosen), settings, tmp_path, command=command)

    return start


def test_a_smaller_run_replaces_no_result(run, tmp_path, kvq):
    large = run([build("fp16"), KIVI[32]], 4)
    small = run([KIVI[32]], 2, command="kvq eval --samples 2")
    records = load_runs(tmp_path)
    assert [each.id for each in records] == [1, 2] and records[1].command == "kvq eval --samples 2"
    assert records[0].time <= records[1].time and records[0].settings == records[1].settings
    assert records[0].methods == json.loads(json.dumps(large["methods"]))
    assert json.loads((tmp_path / "comparison.json").read_text())["run"]["id"] == 2
    kept = json.loads((tmp_path / "kivi-2bit,residual=32" / "results.json").read_text())
    assert kept == records[0].methods["kivi-2bit"]
    shown = shown_results(tmp_path)
    assert shown.methods == records[0].methods and shown.fewer == [(2, "kivi-2bit", "2")] and shown.others == []
    assert shown_results(tmp_path, 2).methods == json.loads(json.dumps(small["methods"]))
    table, other = kvq("results", tmp_path), kvq("results", tmp_path, "--run", 2)
    assert "run 1, 20" in table.stdout and "n = 4" in table.stdout
    assert table.stderr.splitlines() == ["run 2 has fewer samples of kivi-2bit (2): --run 2 shows it"]
    assert "run 2, 20" in other.stdout and "n = 2" in other.stdout and other.stderr == ""


def test_methods_of_several_runs_stand_in_one_table_with_their_samples(run, tmp_path, kvq):
    run([build("fp16"), KIVI[32]], 2)
    run([KIVI[64]], 3)
    run([KIVI[32]], 4)
    shown = shown_results(tmp_path).methods  # two of the label kivi-2bit
    ids = {label: document["config"]["run"]["id"] for label, document in shown.items()}
    assert ids == {"fp16": 1, "kivi-2bit,residual=32": 3, "kivi-2bit,residual=64": 2}
    table = kvq("results", tmp_path, "--format", "csv")
    assert "runs of the same tasks and settings are shown together; --run N shows one" in table.stderr
    lines = table.stdout.splitlines()
    assert lines[0].endswith(",n,run")
    assert [line.split(",")[-2:] for line in lines[1:]] == [["2", "1"], ["4", "3"], ["3", "2"]]
    document = json.loads(kvq("results", tmp_path, "--json").stdout)
    assert {label: one["perplexity"]["effective"] for label, one in document["n-samples"].items()} == {
        "fp16": 2,
        "kivi-2bit,residual=32": 4,
        "kivi-2bit,residual=64": 3,
    }
    differences = json.loads(kvq("results", tmp_path, "--baseline", "fp16", "--json").stdout)["methods"]
    assert all(row["perplexity-96 loss"]["samples"] == 2 for row in differences.values())  # what both have


def test_runs_with_other_settings_are_not_mixed(run, tmp_path, kvq, fails):
    run([KIVI[32]], 4)
    run([KIVI[32]], 2, prompt_tokens=40)
    shown = shown_results(tmp_path)
    assert [one["config"]["run"]["id"] for one in shown.methods.values()] == [2] and list(shown.others) == [1]
    assert "with other tasks or settings: run 1; --runs lists all" in kvq("results", tmp_path).stderr
    listed = json.loads(kvq("results", tmp_path, "--runs", "--json").stdout)
    assert [(one["run"], one["n"], one["methods"]) for one in listed] == [
        (1, "4", ["kivi-2bit"]),
        (2, "2", ["kivi-2bit"]),
    ]
    assert len([line for line in kvq("results", tmp_path, "--runs").stdout.splitlines() if "kvq eval" in line]) == 2
    fails("results", tmp_path, "--run", 7, code=2, says="--run 7: no such run in")


def _forget(document):
    """As versions wrote it that named neither."""
    del document["config"]["results"], document["config"]["weights"], document["config"]["resume_keys"]


@pytest.mark.parametrize(
    "change",
    [
        lambda document: document["config"].update(results=document["config"]["results"] - 1),
        lambda document: document["config"].update(weights="others"),
        lambda document: document["config"]["resume_keys"]["perplexity-96"].update(windows_sha256="others"),
        lambda document: document["versions"].update(perplexity=1),
        lambda document: document.update(kvq_version="0.2.0"),
        _forget,
    ],
    ids=["results", "weights", "text", "evaluation", "kvq", "no version"],
)
def test_older_numbers_of_more_samples_are_not_shown(run, tmp_path, kvq, change):
    run([build("fp16"), KIVI[32]], 4)
    _change_files(tmp_path, change)
    run([KIVI[32]], 2)
    shown = shown_results(tmp_path)
    assert [one["config"]["run"]["id"] for one in shown.methods.values()] == [2] and list(shown.others) == [1]
    assert "n = 2" in kvq("results", tmp_path).stdout
    kept = json.loads((tmp_path / "kivi-2bit,residual=32" / "results.json").read_text())
    assert kept["config"]["run"]["id"] == 2


def _change_files(folder, change):
    """Apply a change to each document in the files of the first run."""
    for path in [*folder.glob("*/results.json"), folder / "runs" / "1.json"]:
        content = json.loads(path.read_text())
        for document in content["methods"].values() if "methods" in content else [content]:
            change(document)
        path.write_text(json.dumps(content))


def test_more_samples_on_another_backend_are_not_shown_for_a_method(run, tmp_path):
    """Of a method that the newest run lacks, they are: methods of one run may have different backends, too."""
    run([build("fp16"), KIVI[32]], 4)
    _change_files(tmp_path, lambda document: document["config"].update(backend="triton"))
    run([KIVI[32]], 3)
    run([KIVI[32]], 2)
    shown = shown_results(tmp_path)
    assert {label: one["config"]["run"]["id"] for label, one in shown.methods.items()} == {"fp16": 1, "kivi-2bit": 2}
    assert shown.fewer == [(3, "kivi-2bit", "2")]


@pytest.fixture
def failing(monkeypatch):
    """The method whose keys overflow, as kivi does at 1 bit inside the block."""

    @contextmanager
    def overflow():
        check = CompressedLayer._check_finite

        def fail(layer, forward):
            if layer.key_stream.codec.nominal_bits == 1:
                raise NotFiniteError("layer 0: the keys contain NaN")
            check(layer, forward)

        with monkeypatch.context() as changed:
            changed.setattr(CompressedLayer, "_check_finite", fail)
            yield

    return overflow


def test_failed_methods_are_named_until_they_have_a_result(run, tmp_path, kvq, failing):
    bad, error = build("kivi", bits=1, residual=32), {"kivi-1bit": "layer 0: the keys contain NaN"}
    with failing():
        run([KIVI[32], bad], 2)
    run([KIVI[32]], 3)
    assert shown_results(tmp_path).failed == shown_results(tmp_path, 1).failed == error
    assert not shown_results(tmp_path, 2).failed
    for flags in ((), ("--format", "csv"), ("--run", 1)):
        assert "left out: kivi-1bit: layer 0: the keys contain NaN" in kvq("results", tmp_path, *flags).stderr, flags
    assert json.loads(kvq("results", tmp_path, "--json").stdout)["failed"] == error
    listed = json.loads(kvq("results", tmp_path, "--runs", "--json").stdout)
    assert [one["failed"] for one in listed] == [error, {}]
    assert "kivi-1bit" in kvq("results", tmp_path, "--runs").stdout
    assert kvq("report", tmp_path).exit_code == 0
    assert "Left out: kivi-1bit: layer 0: the keys contain NaN." in (tmp_path / "report.html").read_text()
    run([KIVI[32], bad], 2)
    assert not shown_results(tmp_path).failed and "left out" not in kvq("results", tmp_path).stderr
    assert kvq("report", tmp_path).exit_code == 0 and "Left out" not in (tmp_path / "report.html").read_text()


def test_failed_methods_of_a_comparison_without_runs_are_named(run, tmp_path, failing):
    """As a published one, which is recorded before the next run replaces it."""
    with failing():
        run([KIVI[32], build("kivi", bits=1, residual=32)], 2)
    shutil.rmtree(tmp_path / "runs")
    assert list(shown_results(tmp_path).failed) == ["kivi-1bit"]
    run([KIVI[32]], 2)
    assert [list(one.failed) for one in (shown_results(tmp_path), *load_runs(tmp_path))] == [["kivi-1bit"]] * 2 + [[]]


def test_results_without_a_record_are_recorded_before_they_are_replaced(run, tmp_path, kvq):
    """A folder of an older version: its comparison.json has no run."""
    before = json.loads(json.dumps(without_run(run([KIVI[32]], 4))))
    for path in (tmp_path / "runs").iterdir():
        path.unlink()
    (tmp_path / "runs").rmdir()
    (tmp_path / "comparison.json").write_text(json.dumps(before))
    assert "n = 4; the run is not recorded" in kvq("results", tmp_path).stdout
    run([KIVI[32]], 1)
    adopted, newest = load_runs(tmp_path)
    assert adopted.command is None and without_run({"methods": adopted.methods})["methods"] == before["methods"]
    assert newest.id == 2 and shown_results(tmp_path).methods == adopted.methods


def test_a_record_of_a_run_killed_while_writing_is_ignored(run, tmp_path):
    run([KIVI[32]], 1)
    (tmp_path / "runs" / "2.json").touch()
    assert [each.id for each in load_runs(tmp_path)] == [1]
    assert run([KIVI[32]], 1)["run"]["id"] == 3


def _claimant(folder, indices):
    """A process that claims samples and then waits for its end."""
    code = f"""
import sys
from pathlib import Path
from kvq_cli.evaluation.sample_log import SampleLog
with SampleLog(Path({str(folder)!r}), "vt", {{}}) as log:
    print(log.claim({indices!r}), flush=True)
    for line in sys.stdin:
        log.append([{{"index": int(line), "by": "other"}}])
        log.release([int(line)])
        print("written", flush=True)
"""
    return subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def test_claims_exclude_other_processes_until_released_or_killed(tmp_path):
    other = _claimant(tmp_path, [0, 1, 2])
    assert other.stdout.readline() == "[0, 1, 2]\n"
    with SampleLog(tmp_path, "vt", {}) as log:
        assert log.claim([2, 3]) == [] and log.claim([3, 4]) == [3, 4]
        other.stdin.write("1\n")
        assert other.stdout.readline() == "written\n"
        assert log.claim([1]) == [] and log.records == {1: {"index": 1, "by": "other"}}  # finished: not done again
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert log.claim([0, 1, 2]) == [0, 2]  # taken over from the killed process
        log.append([{"index": 0, "by": "this"}])
    assert read_records(log.path) == {1: {"index": 1, "by": "other"}, 0: {"index": 0, "by": "this"}}


def test_appending_repairs_the_line_of_a_process_killed_while_writing(tmp_path):
    with SampleLog(tmp_path, "vt", {}) as log:
        log.append([{"index": 0}])
        with open(log.path, "a") as file:
            file.write('{"index": 1, "sco')
        log.append([{"index": 2}])
    assert list(read_records(log.path)) == [0, 2]


WORDS = ["eval", "--task", "niah_single_1,perplexity", "--compare", "fp16,kivi-2bit:residual=32", "--samples", "6"]
WORDS += ["--seqlen", "320"]


def _start(folder, out):
    words = [sys.executable, "-m", "kvq_cli", *WORDS, "--batch-size", "1", "--out", str(out)]
    return subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def _count(out):
    return {path: len(path.read_text().splitlines()) - 1 for path in out.glob("*/*.jsonl")}


@pytest.mark.slow
def test_two_runs_at_once_share_the_samples(tmp_path):
    """Each sample is evaluated once, also where one of the runs is killed, and results are those of a single run."""
    once, shared, killed = (tmp_path / name for name in ("once", "shared", "killed"))
    process = _start(tmp_path, once)
    assert process.wait() == 0, process.stderr.read()
    results = without_run(json.loads((once / "comparison.json").read_text()))
    both = [_start(tmp_path, shared) for _ in range(2)]
    for process in both:
        assert process.wait() == 0, process.stderr.read()
    first, second = _start(tmp_path, killed), _start(tmp_path, killed)
    while sum(_count(killed).values()) < 4:
        assert first.poll() is None and second.poll() is None
        time.sleep(0.01)
    first.kill()
    first.wait()
    assert second.wait() == 0, second.stderr.read()
    for out, runs in ((shared, [1, 2]), (killed, [1])):
        assert sorted(_count(out).values()) == [6] * 4  # none twice
        records = load_runs(out)
        assert [each.id for each in records] == runs
        for each in records:
            assert without_run({"methods": dict(each.methods)})["methods"] == results["methods"]


def test_methods_of_another_folder_stand_beside_those_of_this_one(loaded, tmp_path, kvq, fails):
    def run(folder, chosen, **changes):
        settings = EvaluationSettings(**{"tasks": ["perplexity"], "seqlens": [96], "samples": 3, **changes})
        evaluate(loaded, compared_methods(chosen), settings, tmp_path / folder)

    run("a", [build("fp16"), KIVI[32]])
    run("b", [build("fp16"), KIVI[64], build("turboquant", bits=2)])
    run("c", [KIVI[32]], seqlens=[64])
    found = kvq("results", tmp_path / "a", "--with", tmp_path / "b", "--baseline", "turboquant-2bit", "--json")
    rows = json.loads(found.stdout)["methods"]
    assert list(rows) == ["fp16", "kivi-2bit", "kivi-2bit (b)"]
    together = kvq("results", tmp_path / "b", "--baseline", "turboquant-2bit", "--json")
    assert rows["kivi-2bit (b)"]["perplexity-96 KL"]["mean"] == pytest.approx(
        json.loads(together.stdout)["methods"]["kivi-2bit"]["perplexity-96 KL"]["mean"]
    )
    (tmp_path / "other").mkdir()
    shutil.copytree(tmp_path / "b", tmp_path / "other" / "b")
    twice = ("results", tmp_path / "a", "--with", tmp_path / "b", "--with", tmp_path / "other" / "b", "--format", "csv")
    assert len(kvq(*twice).stdout.splitlines()) == 7  # the head, fp16, kivi of three folders, turboquant of two
    compact = json.loads((tmp_path / "other" / "b" / "comparison.json").read_text())
    for document in compact["methods"].values():
        del document["configs"]
    shutil.rmtree(tmp_path / "other" / "b" / "runs")
    (tmp_path / "other" / "b" / "comparison.json").write_text(json.dumps(compact))
    fails(*twice[:2], "--with", tmp_path / "other" / "b", code=2, says="does not say the settings of its tasks")
    table = kvq("results", tmp_path / "a", "--with", tmp_path / "b", "--format", "csv").stdout.splitlines()
    assert [line.split(",")[0] for line in table] == ["method", "fp16", "kivi-2bit", "kivi-2bit (b)", "turboquant-2bit"]
    said = f"--with {tmp_path / 'c'}: another prompts, tasks than {tmp_path / 'a'} has: not the same samples"
    fails("results", tmp_path / "a", "--with", tmp_path / "c", code=2, says=said)

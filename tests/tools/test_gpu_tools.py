"""Scripts of the `make gpu-*` commands: parallel tests, packs of compiled kernels, archives of results."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
from gpu import archive, pack  # noqa: E402
from gpu import run_tests as run_tests_script  # noqa: E402

TESTS = """
import os, pathlib, pytest
@pytest.mark.parametrize("i", range(5))
def test_passes(i):
    with pathlib.Path(os.environ["RUNS"]).open("a") as runs:
        runs.write("x")
def test_mended():
    assert os.environ["MENDED"] == "yes", "not yet"
"""


def run_tests(folder: Path, mended: str) -> tuple[subprocess.CompletedProcess, dict, int]:
    """Run the script; returns the process, its result, and how often the passing tests ran."""
    (folder / "test_some.py").write_text(TESTS)
    (folder / "pytest.ini").write_text("[pytest]\n")
    runs = folder / f"runs-{mended}"
    command = [sys.executable, ROOT / "tools/gpu/run_tests.py", "--out", folder / "out", "--jobs", "2", "test_some.py"]
    environment = {"PATH": "/usr/bin:/bin", "RUNS": str(runs), "MENDED": mended}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    result = json.loads((folder / "out/tests.json").read_text())
    return done, result, len(runs.read_text()) if runs.exists() else 0


@pytest.mark.slow
def test_parallel_tests_run_once_and_resume_after_failures(tmp_path):
    done, result, runs = run_tests(tmp_path, "no")
    assert done.returncode == 1 and "FAILED test_some.py::test_mended" in done.stdout and "not yet" in done.stdout
    assert (result["passed"], result["failed"], runs) == (5, 1, 5)
    done, result, runs = run_tests(tmp_path, "yes")
    assert done.returncode == 0, done.stdout
    assert (result["passed"], result["failed"], runs) == (6, 0, 0)


@pytest.mark.slow
def test_tests_of_other_kernels_are_run_again(tmp_path):
    _, result, _ = run_tests(tmp_path, "no")
    result["sources"]["kernels"] = "another"
    (tmp_path / "out/tests.json").write_text(json.dumps(result))
    done, result, runs = run_tests(tmp_path, "yes")
    assert (result["passed"], runs) == (6, 5) and "these have changed: kernels\n" in done.stdout


@pytest.mark.parametrize("changed", [None, "torch", "triton", "kernels", "tests and kvq_cli"])
def test_results_are_kept_only_of_the_same_sources(changed):
    rows = [{"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "failed"}, {"test": "c", "outcome": "skipped"}]
    sources = run_tests_script.sources_of([])
    document = {"tests": rows, "sources": sources | ({changed: "another"} if changed else {})}
    assert run_tests_script.passed_before(document, sources) == ([] if changed else rows[:1])
    assert run_tests_script.passed_before({"tests": rows}, sources) == []  # of an older version of the script


def test_a_changed_test_file_changes_the_sources(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "test_some.py").write_text("")
    before = run_tests_script.sources_of(["test_some.py::test_it", "-k", "it"])
    (tmp_path / "test_some.py").write_text("x")
    after = run_tests_script.sources_of(["test_some.py::test_it", "-k", "it"])
    assert [name for name in before if before[name] != after[name]] == ["tests and kvq_cli"]


def test_installing_a_pack_rewrites_the_paths_of_its_entries(tmp_path):
    entry = tmp_path / "there" / "ABC"
    entry.mkdir(parents=True)
    names = ["kernel.cubin", "kernel.ttir", "kernel.json"]
    for name in names:
        (entry / name).write_text(name)
    (entry / "__grp__kernel.json").write_text(json.dumps({"child_paths": {name: str(entry / name) for name in names}}))
    used = tmp_path / "used"
    used.write_text(f"{entry}\n{entry}\n{tmp_path / 'there' / 'GONE'}\n")
    pack.make(tmp_path / "there", used, tmp_path / "pack.tar.xz")
    here = tmp_path / "here"
    pack.install(tmp_path / "pack.tar.xz", here)
    paths = json.loads((here / "ABC/__grp__kernel.json").read_text())["child_paths"]
    assert paths == {name: str(here / "ABC" / name) for name in ("kernel.cubin", "kernel.json")}
    assert pack.count(here) == 1
    (here / "ABC/kernel.cubin").unlink()
    pack.install(tmp_path / "pack.tar.xz", here)  # installed before: no file is written again
    assert not (here / "ABC/kernel.cubin").exists()


def test_a_pack_of_another_triton_is_reported(tmp_path, monkeypatch, capsys):
    (tmp_path / "used").write_text("")
    pack.make(tmp_path, tmp_path / "used", tmp_path / "pack.tar.xz")
    here = pack.versions()
    monkeypatch.setattr(pack, "versions", lambda: here | {"triton": "0.1"})
    pack.install(tmp_path / "pack.tar.xz", tmp_path / "cache")
    assert "another triton" in capsys.readouterr().out


TABLE = "kernels/kvq_kernels/decode_attention/tuning.json"


def write_table(root: Path, table: dict) -> Path:
    path = root / TABLE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(table))
    return path


def tuned(key: str, warps: int, before: float, us: float) -> dict:
    """A row of `tune.json`."""
    best = {"warps": warps}
    return {"operation": "decode_attention", "gpu": "sm_90", "class": key, "before_us": before, "us": us, "best": best}


@pytest.fixture
def gpu_machine(tmp_path, monkeypatch):
    """`gpu_machine(name, table, rows)`: the archive of a command on a machine whose tuning table is `table`, and where
    the last search wrote `rows`."""
    root = tmp_path / "there"
    monkeypatch.setattr(archive, "ROOT", root)
    monkeypatch.setattr(archive, "gpu_name", lambda: "some-gpu")

    def run(name: str, table: dict, rows: list[dict]) -> Path:
        write_table(root, table)
        results = root / "results"
        results.mkdir(exist_ok=True)
        (results / "kernels.json").write_text('{"rows": []}')
        (results / "notes.txt").write_text("not packed")
        (results / "tune.json").write_text(json.dumps({"rows": rows}))
        return archive.pack(name, results, tmp_path / "out")

    return run


def test_an_archive_restores_results(tmp_path, gpu_machine):
    file = gpu_machine("gpu-bench", {"sm_90": {"dense": {"warps": 4}}}, [tuned("dense", 4, 2.0, 1.0)])
    with tarfile.open(file) as content:
        assert content.getnames() == ["results/kernels.json", "results/tune.json", "about.json"]  # and no tables
    here = write_table(tmp_path, {"sm_90": {"dense": {"warps": 8}}})
    written = archive.unpack(file, tmp_path)
    assert (tmp_path / "benchmarks/some-gpu/kernels.json").read_text() == '{"rows": []}'
    assert here not in written and json.loads(here.read_text()) == {"sm_90": {"dense": {"warps": 8}}}


def test_an_archive_changes_only_the_tuning_rows_of_its_own_search(tmp_path, gpu_machine):
    """Others have been tuned here since the machine got its table."""
    classes = {"dense": {"warps": 4}, "uniform": {"warps": 2}, "codebook": {"warps": 1}}
    there = {"*": {"*": {"warps": 1}}, "sm_90": classes}
    rows = [tuned("dense", 4, 2.0, 1.0), tuned("uniform", 2, 3.0, 3.0), tuned("codebook", 8, float("inf"), 1.0)]
    file = gpu_machine("gpu-tune", there, rows)  # the row of `codebook` was not written, as in a dry run
    here = write_table(tmp_path, {"*": {"*": {"warps": 7}}, "sm_90": {"uniform": {"warps": 7}}})
    assert here in archive.unpack(file, tmp_path)
    expected = {"*": {"*": {"warps": 7}}, "sm_90": {"uniform": {"warps": 7}, "dense": {"warps": 4}}}
    assert json.loads(here.read_text()) == expected
    assert here not in archive.unpack(file, tmp_path)  # nothing changes


def test_an_archive_keeps_the_rows_of_an_earlier_search(tmp_path, gpu_machine):
    """The second search continues the first one; a row that it or someone changes again is replaced."""
    first = {"sm_90": {"dense": {"warps": 4}, "uniform": {"warps": 4}, "codebook": {"warps": 4}}}
    gpu_machine("gpu-tune", first, [tuned(key, 4, 2.0, 1.0) for key in first["sm_90"]])
    second = {"sm_90": {"dense": {"warps": 4}, "uniform": {"warps": 8}, "codebook": {"warps": 2}}}
    file = gpu_machine("gpu-tune", second, [tuned("dense", 4, 1.0, 1.0), tuned("uniform", 8, 1.0, 0.5)])
    here = write_table(tmp_path, {"sm_90": {}})
    archive.unpack(file, tmp_path)
    assert json.loads(here.read_text()) == {"sm_90": {"dense": {"warps": 4}, "uniform": {"warps": 8}}}


def test_archives_are_unpacked_by_an_environment_with_torch():
    command = ["make", "-C", str(ROOT), "--dry-run", "--always-make", "gpu-unpack", "FILE=some.tar.gz"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "-m venv .venv" in printed and ".venv/bin/python tools/gpu/archive.py unpack some.tar.gz" in printed


@pytest.mark.parametrize("words", [[], ["pack"], ["unpack"], ["nonsense", "a"]])
def test_invalid_arguments_print_the_usage(words, capsys):
    assert archive.main(words) == 2 and "unpack FILE" in capsys.readouterr().err

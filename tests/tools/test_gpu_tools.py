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


def test_parallel_tests_run_once_and_resume_after_failures(tmp_path):
    done, result, runs = run_tests(tmp_path, "no")
    assert done.returncode == 1 and "FAILED test_some.py::test_mended" in done.stdout and "not yet" in done.stdout
    assert (result["passed"], result["failed"], runs) == (5, 1, 5)
    done, result, runs = run_tests(tmp_path, "yes")
    assert done.returncode == 0, done.stdout
    assert (result["passed"], result["failed"], runs) == (6, 0, 0)


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


def test_an_archive_restores_results_and_merges_tuning_tables(tmp_path, monkeypatch):
    results = tmp_path / "results"
    results.mkdir()
    (results / "kernels.json").write_text('{"rows": []}')
    (results / "notes.txt").write_text("not packed")
    monkeypatch.setattr(archive, "gpu_name", lambda: "some-gpu")
    file = archive.pack("gpu-bench", results, tmp_path / "out")
    with tarfile.open(file) as content:
        assert "results/kernels.json" in content.getnames() and "results/notes.txt" not in content.getnames()
    table = tmp_path / "kernels/kvq_kernels/decode_attention/tuning.json"
    table.parent.mkdir(parents=True)
    table.write_text('{"*": {"*": {"warps": 1}}, "sm_70": {"dense": {"warps": 2}}}')
    written = archive.unpack(file, tmp_path)
    assert (tmp_path / "benchmarks/some-gpu/kernels.json").read_text() == '{"rows": []}'
    merged = json.loads(table.read_text())
    shipped = json.loads((ROOT / "kernels/kvq_kernels/decode_attention/tuning.json").read_text())
    assert merged == shipped | {"sm_70": {"dense": {"warps": 2}}} and table in written


@pytest.mark.parametrize("words", [[], ["pack"], ["unpack"], ["nonsense", "a"]])
def test_invalid_arguments_print_the_usage(words, capsys):
    assert archive.main(words) == 2 and "unpack FILE" in capsys.readouterr().err

"""`kvq bench kernels` as a command: what is refused, what a dry run leaves, what is read from compiled code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kvq_kernels import static

ROOT = Path(__file__).parents[2]
GOOD = {"registers": 100, "shared": 4096, "per_number": 4.0, "bits": 3.0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(fails):
    fails("bench", "kernels", code=2, says="use --static or --dry")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--target", "sm_90"], "--target goes with --static"),
        (["--static", "--target", "sm_1"], "valid: sm_80"),
        (["--static", "--operation", "nonsense"], "--operation nonsense: unknown"),
        (["--dry", "--operation", "nonsense"], "nothing is measured of it"),
    ],
)
def test_bad_input_is_one_line(fails, flags, says):
    fails("bench", "kernels", *flags, code=2, says=says)


def test_a_dry_run(kvq, tmp_path):
    flags = ["--dry", "--operation", "assign_centroids", "--out", "out", "--tune", "--tune-seconds", 1, "--json"]
    result = kvq("bench", "kernels", *flags)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert json.loads((tmp_path / "out/kernels.json").read_text()) == found
    assert (tmp_path / "out/kernels.png").read_bytes()[:4] == b"\x89PNG"
    assert found["dry"] and "gpu" not in found["machine"] and found["copy_gb_s"] > 0
    assert len(found["checked"]) == len(found["rows"]) == 3 and all("us" in row for row in found["rows"])
    assert {row["class"] for row in found["tuned"]} == {"assign/size2", "assign/size4", "assign/size8"}
    assert "blocks of 4" in result.stderr


def test_only_checking_leaves_nothing(kvq, tmp_path):
    result = kvq("bench", "kernels", "--dry", "--check", "--operation", "assign_centroids", "--out", "out")
    assert result.exit_code == 0 and "blocks of 8" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def compiled(monkeypatch):
    """`compiled(**changes)`: what compiling is to give, of one launch on two targets."""

    def set_(**changes):
        def reports(chosen):
            for one in reversed(chosen):
                yield static.Report(*one, kind="uniform", **GOOD | changes)

        targets = ("sm_90", "gfx942")
        monkeypatch.setattr(static, "everything", lambda names: [("a", "b", name) for name in targets if name in names])
        monkeypatch.setattr(static, "reports", reports)

    return set_


def test_compiled_code_as_a_table(kvq, compiled, tmp_path):
    compiled()
    result = kvq("bench", "kernels", "--static", "--out", "out", "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [row["target"] for row in rows] == ["sm_90", "gfx942"] and rows[0]["faults"] == []
    assert set(rows[0]["floors_us"]) == {"1 x 32768", "1 x 131072", "8 x 32768", "8 x 131072"}
    assert json.loads((tmp_path / "out/static.json").read_text())["rows"] == rows
    assert "floors of 1 x 131072 tokens on h200" in result.stderr and "mi300x" in result.stderr


def test_faults_of_compiled_code_fail(kvq, compiled):
    compiled(spills=8, per_number=5.0)
    result = kvq("bench", "kernels", "--static", "--target", "sm_90")
    assert result.exit_code == 1
    assert "sm_90 a b: 8 bytes per thread spill" in result.stderr and "5.0 instructions per number" in result.stderr
    assert "2 faults in compiled code" in result.stderr


@pytest.mark.slow
def test_make_gpu_dry(tmp_path):
    """The Makefile's own commands, with less to do."""
    less = [
        "GPU_TESTS=tests/kernels/test_tuning.py",
        "GPU_KERNELS=--dry --operation assign_centroids --tune-seconds 1",
        "GPU_GROWTH=--random tiny --context 64 --tokens 1 --batch 1 --device cpu",
        "GPU_METHODS=kivi",
        f"GPU_OUT={tmp_path}",
    ]
    words = ["make", "-C", ROOT, "gpu", "DRY=1", f"PYTHON={sys.executable}", *less]
    ran = subprocess.run(words, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    names = {path.name for path in (tmp_path / "dry").iterdir()}
    assert names == {"kernels.json", "kernels.png", "calibrate.json", "growth.json", "growth.png"}

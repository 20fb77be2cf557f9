"""`kvq bench kernels` and `kvq bench tune`: invalid options, dry runs, resuming, and --static."""

from __future__ import annotations

import json

import pytest
import torch
from kvq_kernels import static

GOOD = {"registers": 100, "shared": 4096, "per_number": 4.0, "bits": 3.0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_suggests_dry(fails):
    fails("bench", "kernels", code=2, says="use --dry")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--target", "sm_90"], "--target needs --static"),
        (["--static", "--target", "sm_1"], "valid: sm_80"),
        (["--static", "--operation", "nonsense"], "--operation nonsense: unknown"),
        (["--dry", "--operation", "nonsense"], "nothing is measured of it"),
    ],
)
def test_invalid_options_are_refused(fails, flags, says):
    fails("bench", "kernels", *flags, code=2, says=says)


def test_a_dry_run_writes_rows_and_a_figure(kvq, tmp_path):
    flags = ["--dry", "--operation", "assign_centroids", "--out", "out", "--json"]
    result = kvq("bench", "kernels", *flags)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert json.loads((tmp_path / "out/kernels.json").read_text()) == found
    assert (tmp_path / "out/kernels.png").read_bytes()[:4] == b"\x89PNG"
    assert found["dry"] and "gpu" not in found["machine"] and found["copy_gb_s"] > 0
    assert len(found["checked"]) == len(found["rows"]) == 3 and all("us" in row for row in found["rows"])
    assert "blocks of 4" in result.stderr


def test_resume_keeps_measured_shapes_of_the_same_machine(kvq, tmp_path):
    flags = ["bench", "kernels", "--dry", "--operation", "assign_centroids", "--out", "out", "--json"]
    first = json.loads(kvq(*flags).stdout)
    path, seven = tmp_path / "out/kernels.json", {"p20": 7.0, "p50": 7.0, "p80": 7.0, "n": 1}
    path.write_text(json.dumps(first | {"rows": [row | {"us": seven} for row in first["rows"]]}))
    result = kvq(*flags, "--resume")
    assert "1 shapes were measured before" in result.stderr
    assert [row["us"] for row in json.loads(result.stdout)["rows"]] == [seven] * 3  # not measured again
    path.write_text(json.dumps(first | {"machine": first["machine"] | {"device": "another"}}))
    result = kvq(*flags, "--resume")
    assert "measuring everything again" in result.stderr and len(json.loads(result.stdout)["rows"]) == 3


def test_a_dry_tuning_run_writes_a_row_per_class(kvq, tmp_path):
    flags = ["--dry", "--operation", "assign_centroids", "--out", "out", "--seconds", 1, "--json"]
    result = kvq("bench", "tune", *flags)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert json.loads((tmp_path / "out/tune.json").read_text()) == found
    assert {row["class"] for row in found["rows"]} == {"assign/size2", "assign/size4", "assign/size8"}


def test_check_writes_no_files(kvq, tmp_path):
    result = kvq("bench", "kernels", "--dry", "--check", "--operation", "assign_centroids", "--out", "out")
    assert result.exit_code == 0 and "blocks of 8" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def compiled(monkeypatch):
    """`compiled(**changes)` replaces compilation by reports of a launch on two targets."""

    def replace(**changes):
        def reports(chosen):
            for launch in reversed(chosen):
                yield static.Report(*launch, kind="uniform", **GOOD | changes)

        targets = ("sm_90", "gfx942")
        monkeypatch.setattr(
            static, "all_launches", lambda names: [("a", "b", name) for name in targets if name in names]
        )
        monkeypatch.setattr(static, "reports", reports)

    return replace


def test_static_lists_compiled_code_and_its_floors(kvq, compiled, tmp_path):
    compiled()
    result = kvq("bench", "kernels", "--static", "--out", "out", "--json")
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["rows"]
    assert [row["target"] for row in rows] == ["sm_90", "gfx942"] and rows[0]["faults"] == []
    assert set(rows[0]["floors_us"]) == {"1 x 32768", "1 x 131072", "8 x 32768", "8 x 131072"}
    assert json.loads((tmp_path / "out/static.json").read_text())["rows"] == rows
    assert "floors of 1 x 131072 tokens on h200" in result.stderr and "mi300x" in result.stderr


def test_static_fails_on_faults(kvq, compiled):
    compiled(spills=8, per_number=5.0)
    result = kvq("bench", "kernels", "--static", "--target", "sm_90")
    assert result.exit_code == 1
    assert "sm_90 a b: 8 bytes per thread spill" in result.stderr and "5.0 instructions per number" in result.stderr
    assert "2 faults in compiled code" in result.stderr

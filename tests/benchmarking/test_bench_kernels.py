"""`kvq bench kernels` and `kvq bench tune`: invalid options, dry runs, resuming, and --static."""

from __future__ import annotations

import json
import math

import pytest
import torch
from kvq_kernels import static

from kvq_cli.benchmarking.kernels.plot import plot
from kvq_cli.benchmarking.kernels.timing import Timer
from kvq_cli.cli.bench_tune import _gain

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
        (["--dry", "--operation", "nonsense"], "no benchmark for it; valid: decode_attention"),
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


def test_results_that_are_not_finite_are_null(kvq, monkeypatch):
    """A kernel that gives NaN has an infinite error, which JSON does not have."""
    monkeypatch.setattr("kvq_cli.benchmarking.kernels.assign._excess_score", lambda *operands: (math.inf, 0.1))
    result = kvq("bench", "kernels", "--dry", "--check", "--operation", "assign_centroids", "--json")
    checked = json.loads(result.stdout, parse_constant=lambda text: pytest.fail(text))["checked"]
    assert result.exit_code == 1 and {row["error"] for row in checked} == {None}


def test_kernels_that_all_fail_are_reported_without_a_figure(kvq, tmp_path, monkeypatch):
    monkeypatch.setattr(Timer, "spread", _fails)
    monkeypatch.setattr(Timer, "copy_rate", lambda timer: 1e9)
    result = kvq("bench", "kernels", "--dry", "--operation", "assign_centroids", "--out", "out")
    assert result.exit_code == 0, result.stderr
    assert "no such launch" in result.stdout and "no plot: no case was timed" in result.stderr
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["kernels.json"]


def test_configurations_that_cannot_run_have_no_time(kvq, monkeypatch):
    monkeypatch.setattr(Timer, "spread", _fails)
    result = kvq("bench", "tune", "--dry", "--operation", "assign_centroids", "--out", "out", "--seconds", 1, "--json")
    rows = json.loads(result.stdout, parse_constant=lambda text: pytest.fail(text))["rows"]
    assert {(row["before_us"], row["us"]) for row in rows} == {(None, None)}
    assert "assign/size2: none runs after 1 configurations" in result.stderr and "nan" not in result.stderr


def _fails(timer, calls):
    raise RuntimeError("no such launch")


def test_gain_where_only_some_configurations_run():
    gains = [_gain(before, now) for before, now in [(3.0, 2.0), (math.inf, 2.0), (math.inf, math.inf), (0.0, 0.0)]]
    assert gains == ["1.50x", "2 us, the first that runs,", "none runs", "1.00x"]


def test_attention_without_a_16_bit_time_is_not_drawn(tmp_path):
    us = {"p20": 1.0, "p50": 1.0, "p80": 1.0, "n": 1}
    row = {"operation": "decode_attention", "case": "kvq kivi", "batch": 1, "context": 64, "us": us, "baseline": False}
    document = {"dry": False, "machine": {"device": "X"}, "rows": [row]}
    assert not plot(document, tmp_path / "a.png") and not (tmp_path / "a.png").exists()
    document["rows"].append(row | {"case": "sdpa", "baseline": True, "ratio": 1.0})
    assert plot(document, tmp_path / "a.png") and (tmp_path / "a.png").exists()

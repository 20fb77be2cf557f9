"""`kvq bench calibrate`: times of phases, and the command."""

import json
import time

import pytest

from kvq_cli.benchmarking.calibrate import PhaseTimer


def test_phase_times_sum_to_the_total():
    shown = []
    timer = PhaseTimer(lambda *call: shown.append(call))
    start = time.perf_counter()
    for phase, done in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
        timer(phase, done, 1)
        time.sleep(0.02)
    timer("b", 1, 1)
    assert list(timer.seconds) == ["prepare", "a", "b"]
    assert timer.seconds["a"] >= 0.04 and timer.seconds["b"] >= 0.04
    assert sum(timer.seconds.values()) == pytest.approx(time.perf_counter() - start, abs=0.01)
    assert shown[0] == ("a", 0, 1) and len(shown) == 5


@pytest.mark.slow
def test_the_command_writes_a_result_but_no_artifact(kvq, tmp_path):
    flags = ["--samples", 2, "--bits", 4, "--set", "hybrid=off", "--out", "out", "--json"]
    result = kvq("bench", "calibrate", *flags)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert sum(found["phases_s"].values()) == pytest.approx(found["total_s"], abs=0.01)
    assert {"capture", "cluster"} <= set(found["phases_s"]) and found["artifact_bytes"] > 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["calibrate.json"]


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--method", "kivi"], 2, "method kivi needs no calibration"),
        (["--bits", 3], 2, "bits=3 is not one of 1, 2, 4"),
        (["--out", "/proc/nonsense"], 1, "cannot write /proc/nonsense"),
    ],
)
def test_invalid_options_are_refused(fails, flags, code, says):
    fails("bench", "calibrate", *flags, code=code, says=says)

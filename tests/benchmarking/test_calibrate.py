"""`kvq bench calibrate`: the seconds of the phases are those of the whole."""

import json
import time

import pytest

from kvq_cli.benchmarking.calibrate import Phases


def test_phases_share_out_all_the_time():
    shown = []
    phases = Phases(lambda *call: shown.append(call))
    start = time.perf_counter()
    for phase, done in (("a", 0), ("a", 1), ("b", 0), ("b", 1)):
        phases(phase, done, 1)
        time.sleep(0.02)
    phases("b", 1, 1)
    assert list(phases.seconds) == ["prepare", "a", "b"]
    assert phases.seconds["a"] >= 0.04 and phases.seconds["b"] >= 0.04
    assert sum(phases.seconds.values()) == pytest.approx(time.perf_counter() - start, abs=0.01)
    assert shown[0] == ("a", 0, 1) and len(shown) == 5


@pytest.mark.slow
def test_the_command_leaves_a_result_and_no_artifact(kvq, tmp_path):
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
def test_bad_input_is_one_line(fails, flags, code, says):
    fails("bench", "calibrate", *flags, code=code, says=says)

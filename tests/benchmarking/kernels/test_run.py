"""Checking, timing and tuning of kernels, with cases whose times are given."""

from __future__ import annotations

import math

import pytest
import torch
from kvq_kernels import tuning

from kvq_cli.benchmarking.kernels import run
from kvq_cli.benchmarking.kernels.experiment import Case, Sizes
from kvq_cli.benchmarking.kernels.timing import Timer
from kvq_cli.benchmarking.kernels.tune import neighbours, tune

CPU, DRY = torch.device("cpu"), Sizes(dry=True)


class FixedTimer(Timer):
    """The time of a call is the number that it returns."""

    def spread(self, calls):
        p50 = sum(call() for call in calls) / len(calls)
        return {"p20": p50, "p50": p50, "p80": p50, "n": 1}


class FakeExperiment:
    operation, tuned_at = "fake", 0

    def __init__(self, *cases):
        self.cases = cases

    def shapes(self, sizes, device):
        yield {"context": 64}, list(self.cases)


def case(name, us, baseline=False, error=0.0, nbytes=1000):
    return Case(name, lambda seed: lambda: us, nbytes, baseline, lambda: (error, 0.1))


def rows(*cases, **options):
    groups = run.measure([FakeExperiment(*cases)], DRY, CPU, FixedTimer(CPU), 1e9, **options)
    return {row["case"]: row for group in groups for row in group}


def test_the_ratio_is_to_the_fastest_baseline():
    found = rows(case("slow", 40.0, True), case("ours", 5.0), case("fast", 20.0, True))
    assert {name: row["ratio"] for name, row in found.items()} == {"slow": 0.5, "fast": 1.0, "ours": 4.0}
    assert list(found)[-1] == "ours"


def test_rates_are_relative_to_a_copy():
    row = rows(case("ours", 5.0, nbytes=2000))["ours"]
    assert row["gb_s"] == 0.4 and row["of_copy"] == 0.4 and "ratio" not in row


def test_other_cases_are_timed_after_a_failure():
    def fails(seed):
        raise RuntimeError("no such backend\nmore")

    found = rows(Case("sdpa x", fails, 1, True), Case("broken", fails, 1), case("ours", 5.0), case("plain", 10.0, True))
    assert found["sdpa x"]["failed"] == found["broken"]["failed"] == "no such backend"
    assert found["ours"]["ratio"] == 2.0


def test_out_of_memory_is_reported():
    def fails(seed):
        raise torch.OutOfMemoryError

    assert rows(Case("ours", fails, 1))["ours"]["failed"] == "out of memory"


def test_measured_shapes_are_skipped():
    [key] = run.all_shape_keys([FakeExperiment(case("ours", 5.0))], DRY, CPU)
    assert rows(case("ours", 5.0), measured={key}) == {}
    assert run.shape_key(rows(case("ours", 5.0))["ours"]) == key


@pytest.mark.parametrize("error", [0.2, math.nan, math.inf])
def test_a_wrong_kernel_is_not_timed(error):
    cases = case("good", 1.0), case("bad", 1.0, error=error)
    checked = list(run.check([FakeExperiment(*cases)], DRY, CPU))
    assert [row["right"] for row in checked] == [True, False]
    found = rows(*cases, wrong={("fake", "bad")})
    assert "wrong on this device" in found["bad"]["failed"] and "us" in found["good"]


def test_a_failing_kernel_is_wrong():
    def error():
        raise RuntimeError("out of registers")

    [row] = run.check([FakeExperiment(Case("bad", lambda seed: None, 1, error=error))], DRY, CPU)
    assert row["right"] is False and row["failed"] == "out of registers"


def test_correct_kernels_are_listed_with_their_errors():
    [row] = run.check([FakeExperiment(case("good", 1.0, error=0.05))], DRY, CPU)
    assert row == {
        "operation": "fake", "case": "good", "context": 64, "right": True, "error": 0.05, "allowed": 0.1
    }  # fmt: skip


@pytest.fixture
def table(tmp_path, monkeypatch):
    path = tmp_path / tuning.FILE
    path.write_text('{"*": {"*": {"tokens": 64, "warps": 1, "stages": 2}}}')
    monkeypatch.setattr(tuning, "_path", lambda operation: path)
    tuning._find.cache_clear()
    yield path
    tuning._find.cache_clear()


def fastest_at(tokens, warps, error=lambda values: 0.0):
    """A case whose time is least with these values and one stage."""

    def values():
        return tuning.configuration("fake", "class", "cpu")

    def call():
        now = values()
        return 1 + abs(math.log2(now["tokens"] / tokens)) + abs(math.log2(now["warps"] / warps)) + now["stages"] / 10

    return Case("ours", lambda seed: call, 1, error=lambda: (error(values()), 0.1))


def test_tuning_finds_the_fastest_and_writes_it(table):
    *_, row = tune([FakeExperiment(fastest_at(16, 4))], DRY, CPU, FixedTimer(CPU), seconds=60)
    assert row["class"] == "class" and row["best"] == {"tokens": 16, "warps": 4, "stages": 1}
    assert row["us"] < row["before_us"]
    assert tuning.configuration("fake", "class", "cpu") == row["best"]
    assert tuning.configuration("fake", "class", "sm_90") == {"tokens": 64, "warps": 1, "stages": 2}


def test_a_stopped_search_continues_from_the_table(table):
    first = tune([FakeExperiment(fastest_at(16, 4))], DRY, CPU, FixedTimer(CPU), seconds=60)
    assert [next(first)["tried"], next(first)["tried"]][0] == 1
    first.close()
    begun = tuning.configuration("fake", "class", "cpu")
    assert begun != {"tokens": 64, "warps": 1, "stages": 2}
    before, *_, row = tune([FakeExperiment(fastest_at(16, 4))], DRY, CPU, FixedTimer(CPU), seconds=60)
    assert before["best"] == begun and row["best"] == {"tokens": 16, "warps": 4, "stages": 1}


def test_tuning_refuses_wrong_configurations(table):
    only_two = fastest_at(64, 8, error=lambda values: 1.0 if values["warps"] > 2 else 0.0)
    *_, row = tune([FakeExperiment(only_two)], DRY, CPU, FixedTimer(CPU), seconds=60)
    assert row["best"]["warps"] == 2


def test_tuning_without_time_keeps_the_table(table):
    before = table.read_text()
    [row] = tune([FakeExperiment(fastest_at(16, 4))], DRY, CPU, FixedTimer(CPU), seconds=0, write=False)
    assert row["tried"] == 1 and row["best"] == {"tokens": 64, "warps": 1, "stages": 2}
    assert table.read_text() == before


@pytest.mark.parametrize(
    ("name", "value", "near"),
    [("tokens", 16, [32]), ("tokens", 128, [64]), ("stages", 1, [2]), ("warps", 2, [1, 4]), ("span", 8, [4, 16])],
)
def test_neighbours_stay_within_bounds(name, value, near):
    assert neighbours(name, value) == near

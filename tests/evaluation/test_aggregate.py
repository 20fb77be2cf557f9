"""Mean scores of task groups."""

from types import SimpleNamespace

import pytest

from kvq_cli.evaluation.aggregate import group_means

RESULTS = {
    "a": {"alias": "a", "acc,x": 0.5, "acc_stderr,x": 0.1, "f1,x": 0.2, "f1_stderr,x": None},
    "b": {"alias": "b", "acc,x": 0.8, "acc_stderr,x": 0.2, "f1,x": 0.4, "f1_stderr,x": None, "own,x": 1.0},
    "c": {"alias": "c", "acc,x": 0.1, "acc_stderr,x": 0.1},
}


RULER = {
    "vt": {"512,none": 0.5, "512_stderr,none": 0.3, "640,none": 0.1, "640_stderr,none": None},
    "cwe": {"512,none": 0.9, "512_stderr,none": 0.4, "640,none": 0.3, "640_stderr,none": 0.1},
}


def _tasks(weighted):
    groups = {"a": "both", "b": "both", "c": "alone"}
    counts = {"a": 10, "b": 30, "c": 5}
    return [SimpleNamespace(task=name, groups={groups[name]: weighted}, count=counts[name]) for name in groups]


def test_group_mean_weights_tasks_equally_or_by_samples():
    plain = group_means(RESULTS, _tasks(False))
    assert set(plain) == {"both"} and set(plain["both"]) == {"alias", "acc,x", "acc_stderr,x", "f1,x", "f1_stderr,x"}
    assert plain["both"]["acc,x"] == pytest.approx(0.65)
    assert plain["both"]["acc_stderr,x"] == pytest.approx((0.1**2 + 0.2**2) ** 0.5 / 2)
    assert plain["both"]["f1,x"] == pytest.approx(0.3) and plain["both"]["f1_stderr,x"] is None
    weighted = group_means(RESULTS, _tasks(True))["both"]
    assert weighted["acc,x"] == pytest.approx((10 * 0.5 + 30 * 0.8) / 40)
    assert weighted["acc_stderr,x"] == pytest.approx(((0.25 * 0.1) ** 2 + (0.75 * 0.2) ** 2) ** 0.5)


def test_task_without_group_has_no_mean():
    assert group_means(RESULTS, [SimpleNamespace(task="a", groups={}, count=3)]) == {}


def test_task_of_several_groups_counts_in_each():
    first, second = SimpleNamespace(task="a", groups={"x": False, "y": True}, count=10), _tasks(True)[1]
    second.groups = {"y": True, "x": False}
    means = group_means(RESULTS, [first, second])
    assert means["x"]["acc,x"] == pytest.approx(0.65)
    assert means["y"]["acc,x"] == pytest.approx((10 * 0.5 + 30 * 0.8) / 40)


def test_ruler_mean_at_several_lengths_has_the_standard_error_of_a_mean_of_independent_tasks():
    tasks = [SimpleNamespace(task=task, groups={"ruler": False}, count=3) for task in ("vt", "vt", "cwe", "cwe")]
    mean = group_means(RULER, tasks)["ruler"]
    assert mean["512,none"] == pytest.approx(0.7) and mean["512_stderr,none"] == pytest.approx(0.25)
    assert mean["640,none"] == pytest.approx(0.2) and mean["640_stderr,none"] is None  # vt has a single sample
    assert group_means(RULER, tasks[:2]) == {}  # a single task

"""RULER's mean over tasks and its standard error."""

from types import SimpleNamespace

import pytest

from kvq_cli.evaluation.summary import _ruler_average

RESULTS = {
    "vt": {"512,none": 0.5, "512_stderr,none": 0.3, "640,none": 0.1, "640_stderr,none": None},
    "cwe": {"512,none": 0.9, "512_stderr,none": 0.4, "640,none": 0.3, "640_stderr,none": 0.1},
    "perplexity": {"perplexity,none": 7.0},
}


def test_ruler_mean_has_the_standard_error_of_a_mean_of_independent_tasks():
    tasks = [("vt", 512), ("vt", 640), ("cwe", 512), ("cwe", 640), ("perplexity", 96)]
    mean = _ruler_average(RESULTS, [SimpleNamespace(task=task, length=length) for task, length in tasks])["ruler"]
    assert mean["512,none"] == pytest.approx(0.7) and mean["512_stderr,none"] == pytest.approx(0.25)
    assert mean["640,none"] == pytest.approx(0.2) and mean["640_stderr,none"] is None  # vt has a single sample


def test_single_task_has_no_mean():
    assert _ruler_average(RESULTS, [SimpleNamespace(task="vt", length=512)]) == {}

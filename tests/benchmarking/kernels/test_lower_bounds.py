"""Lower bounds of decode attention's time, against those of KERNELS.md and written out."""

from __future__ import annotations

import pytest
from kvq_kernels.static import TARGETS, Report

from kvq_cli.benchmarking.gpus import GPUS
from kvq_cli.benchmarking.kernels.lower_bounds import OF_TARGET, lower_bounds


@pytest.mark.parametrize(
    ("bits", "batch", "context", "us"), [(16, 1, 32768, 31), (5, 1, 131072, 39), (3, 8, 32768, 47), (4, 8, 131072, 250)]
)
def test_memory_bounds_equal_kernels_md(bits, batch, context, us):
    report = Report("decode_attention", "x", "sm_90", "uniform", per_number=0.1, bits=bits)
    assert lower_bounds(report, batch, context)["bytes"] == pytest.approx(us, rel=0.02)


def test_the_larger_bound_limits_the_speed_up():
    slow = lower_bounds(Report("o", "x", "sm_90", "uniform", per_number=20.0, bits=3.0), 1, 131072)
    assert slow["issue"] == pytest.approx(1e6 * 2**28 * 20 / (132 * 128 * 1.98e9))
    assert slow["limit"] == pytest.approx(16 / 3 * slow["bytes"] / slow["issue"])
    fast = lower_bounds(Report("o", "x", "sm_90", "uniform", per_number=0.1, bits=3.0), 1, 131072)
    assert fast["limit"] == pytest.approx(16 / 3)


def test_every_target_has_a_gpu():
    assert set(OF_TARGET) == set(TARGETS) and all(issue.gpu in GPUS for issue in OF_TARGET.values())

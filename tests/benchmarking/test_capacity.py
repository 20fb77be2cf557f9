"""What fits into a memory, against counted caches."""

from dataclasses import replace

from kvq_cli.benchmarking.accounting import account
from kvq_cli.benchmarking.capacity import capacity
from kvq_cli.benchmarking.shapes import CONTEXT, SHAPES
from kvq_cli.methods.registry import build


def test_the_sum_over_layers_counts():
    """xquant-cl's X^ is in memory during every pass, and larger than the packed layer inputs."""
    method, shape = build("xquant-cl"), replace(SHAPES["llama-3.2-1b"].model_shape(), layers=4)
    weights, budget = 1000, 100 * 10**6

    def held(context: int, batch: int) -> int:
        report = account(method, shape, context, batch)
        return report.bytes + report.working["accumulator"]

    found = capacity(method, shape, weights, CONTEXT, context=3000, batch=2, budget=budget)
    left = budget - weights - found.artifact
    assert found.cache == held(3000, 2) > 2 * account(method, shape, 3000, 2).bytes and found.fits
    assert held(found.context, 2) <= left < held(int(found.context * 1.01) + 200, 2)
    assert held(3000, found.batch) <= left < held(3000, found.batch + 1)

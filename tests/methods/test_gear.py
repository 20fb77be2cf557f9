"""Plans of GEAR: windows, cost, refusals."""

import pytest
import torch

from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.methods.window import Window


def test_keys_and_values_are_packed_in_whole_chunks(shape):
    plan = build("gear").plan(0, shape, {})
    assert (plan.keys.source, plan.values.source) == ("post_rope", "value")
    assert plan.keys.window == plan.values.window == Window(0, 0, 128)
    plan = build("gear", sinks=4, recent=20, residual=64).plan(0, shape, {})
    assert plan.keys.window == plan.values.window == Window(4, 20, 64)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_cost_after_the_prompt(shape_of, bits, head_dim):
    """KIVI's, 32 bits for each of 2% of the numbers, and two factors of rank 2 in 16 bits for each 128 tokens."""
    shape = shape_of(head_dim=head_dim)
    plan, x = build("gear", bits=bits).plan(0, shape, {}), torch.randn(1, 2, 256, head_dim).half()
    sparse = 32 * 2 * int(0.01 * 128 * head_dim) / (128 * head_dim)
    for stream in (plan.keys, plan.values):
        cost = stream.codec.with_state({}).encode(x).nbytes * 8 / x.numel()
        assert cost == bits + 1 + sparse + 16 * 2 * (128 + head_dim) / (128 * head_dim)
    assert build("gear", bits=bits).nominal_bits == bits


@pytest.mark.parametrize(
    ("options", "head_dim", "message"),
    [
        ({"bits": 5}, 64, r"gear: bits=5 is not one of 1, 2, 3, 4, 8"),
        ({"residual": 100}, 64, r"gear: residual=100 is not a multiple of group=32"),
        ({"outliers": 1.5}, 64, r"outliers=1.5 must be at most 1"),
        ({"loops": 0}, 64, r"loops=0 must be at least 1"),
        ({"rank": 80}, 64, r"rank=80, chunk_rank=2: a head_dim of 64 has no higher rank"),
        ({}, 80, r"group=32 does not divide head_dim=80"),
        ({"residual": 1024}, 64, r"residual=1024: at head_dim=64 a chunk may have at most 512 tokens"),
        ({"outliers": 1e-5}, 64, r"outliers=1e-05 of 128 by 64 numbers keeps none"),
    ],
)
def test_invalid_options_are_refused(shape_of, options, head_dim, message):
    with pytest.raises(UsageError, match=message):
        build("gear", **options).plan(0, shape_of(head_dim=head_dim), {})

"""A paged layer holds what a compressed layer holds, whatever blocks its pages are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_cli.cache.rows import RowSpan
from kvq_cli.cache.stream import Stream
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.registry import build_parsed
from kvq_cli.vllm.batch import BlockTable
from kvq_cli.vllm.layout import cache_layout
from kvq_cli.vllm.pages import PagedStream, shifts

SHAPE = ModelShape(layers=1, query_heads=2, kv_heads=2, head_dim=32, hidden_size=64, dtype="float32")
METHODS = (
    "fp16",
    "kivi:residual=32",
    "kivi:sinks=5:recent=3",
    "innerq:norm=off:sinks=0:recent=7",
    "turboquant:sinks=3",
    "kvarn:group=32:sinks=5",
    "oscar-omni:residual=32",
    "llama-cpp-4bit",
    "per-token-head-4bit:recent=7",
    "quanto-2bit:buffer=32:sinks=3",
)


def pair(method, block_size):
    """(the reference, a paged stream) of the keys, and a function that opens the paged one at a token."""
    plan = build_parsed(method, bits=2).plan(0, SHAPE, {})
    layout = cache_layout([plan], SHAPE, block_size)
    size = 0 if layout.exact is None else layout.exact.block_size
    shift, _ = shifts(plan.keys, plan.values)
    paged = PagedStream(plan.keys, SHAPE, layout.layers[0].keys, layout.block_size, size, shift)
    pages = torch.randint(0, 256, (12, layout.page_bytes), dtype=torch.uint8)
    exact = torch.full((400, size, 2, 32), torch.nan) if size else None
    paged.bind([pages], exact)
    table, exact_table = BlockTable(torch.randperm(12)), BlockTable(torch.randperm(400)) if size else None
    return (
        Stream(plan.keys),
        paged,
        lambda tokens: paged.open(tokens, table, exact_table),
    )


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=8)
@given(runs=st.lists(st.integers(1, 70), min_size=1, max_size=5), seed=st.integers(0, 9))
def test_a_paged_stream_equals_a_stream_bit_for_bit(method, runs, seed):
    torch.manual_seed(seed)
    stream, paged, open_at = pair(method, 96)
    past = 0
    for run in runs:
        x = torch.randn(1, 2, run, 32)
        group = (RowSpan(slice(0, 1), 0, past, past + run, 0),)
        stream.append(x, group)
        open_at(past)
        paged.append(x, group)
        past += run
        assert torch.equal(paged.read(0), stream.read(0))


def test_parts_of_a_page_do_not_overlap():
    layout = cache_layout([build_parsed("kivi", bits=3).plan(0, SHAPE, {})], SHAPE).layers[0]
    taken = torch.zeros(1, layout.nbytes, dtype=torch.uint8)
    for part in (*layout.keys.values(), *layout.values.values()):
        view = part.view([taken], layout.block_size)
        assert not view.any()
        view.view(torch.uint8).fill_(1)
    assert taken.sum() == sum(
        p.nbytes(layout.block_size) for side in (layout.keys, layout.values) for p in side.values()
    )

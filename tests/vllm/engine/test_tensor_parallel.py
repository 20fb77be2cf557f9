"""Two processes that share each layer's heads give the tokens of `generate`."""

import pytest
from vllm_engines import NEW

from kvq_cli.vllm.exact_blocks import ExactManager
from kvq_cli.vllm.layout import cache_layout
from kvq_cli.vllm.shard import Shard

METHODS = (
    "fp16",
    "kivi",
    "innerq:norm=off",
    "turboquant",
    "kvquant",
    "channelkv",
    "temporalkv",
    "temporalkv:outliers=0.01:hybrid=head",  # on this model the ranks have heads of different block shapes
    "klt",
)
#: Of the prompts, which are computed in steps of 128 tokens.
FIRST = 5


def layout_of_rank(case):
    plans, of_rank = case.served.plans_of_ranks(case.shape, 2), Shard(0, 2).shape(case.shape)
    return cache_layout(plans, of_rank).of_rank(0, case.shape.layers)


@pytest.mark.parametrize("method", METHODS)
def test_tokens_of_two_ranks_equal_generate(method, case, start, prompts):
    one, asked = case(method), prompts[:FIRST]
    layout = layout_of_rank(one)
    with start(method, layout.block_size, tensor_parallel_size=2, max_num_batched_tokens=128) as engine:
        assert engine.kv_cache_config.num_blocks == layout.blocks(64 << 20)
        # Specs come from the workers' processes: the scheduler must know what manages their blocks.
        managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
        assert any(isinstance(each, ExactManager) for each in managers) == (layout.exact is not None)
        for _ in range(2):  # the second time with prefix hits
            outputs = engine.tokens(asked, NEW[:FIRST])
            assert [list(output.outputs[0].token_ids) for output in outputs] == one.expected[:FIRST]
        size = layout.block_size
        assert [output.num_cached_tokens for output in outputs] == [(len(p) - 1) // size * size for p in asked]
        assert engine.free_blocks == engine.all_blocks

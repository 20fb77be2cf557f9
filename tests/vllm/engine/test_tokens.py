"""Every method gives the tokens of `generate` inside vLLM, however requests are scheduled."""

import pytest
from vllm_engines import SAMPLED, token_ids

METHODS = (
    "fp16",
    "kivi",
    "kivi:sinks=32:recent=96",
    "kivi:pre_rope=on:sinks=5:recent=0",
    "innerq:norm=off",
    "innerq:norm=off:mode=symmetric:sinks=0:recent=0:buffer=32",
    "turboquant",
    "kvquant",
    "kvquant:outliers=0:recent=20",
    "channelkv",
    "temporalkv",
    "temporalkv:outliers=0.01:hybrid=head",
    "klt",
    "mixed:keys=klt-1bit kivi-2bit:values=temporalkv-2bit",
)
each_method = pytest.mark.parametrize("method", METHODS)


@each_method
def test_concurrent_requests_prefix_hits_and_samples_equal_generate(method, case, start, prompts):
    expected = case(method).expected
    with start(method) as engine:
        assert engine.kv_cache_config.num_blocks == case(method).layout.blocks(64 << 20)
        assert token_ids(engine.tokens(prompts)) == expected

        again = engine.tokens(prompts)
        size = case(method).layout.block_size
        assert [output.num_cached_tokens for output in again] == [(len(p) - 1) // size * size for p in prompts]
        assert token_ids(again) == expected

        (output,) = engine.tokens(prompts[4:5], (50,), **SAMPLED)
        assert [list(sample.token_ids) for sample in output.outputs] == [expected[4]] * 4
        assert engine.free_blocks == engine.all_blocks


def test_pages_of_layers_with_different_bits(case):
    """The cases above have them."""
    for method in (METHODS[-2], METHODS[-1]):
        layout = case(method).layout
        parts = [(number, part) for number, layer in enumerate(layout.layers) for part in layer.keys.values()]
        parts += [(number, part) for number, layer in enumerate(layout.layers) for part in layer.values.values()]
        assert any(part.layer != number for number, part in parts)
        assert layout.page_bytes < max(layer.nbytes for layer in layout.layers)


@each_method
def test_chunked_prefill_and_preemption_in_a_new_engine_equal_generate(method, case, start, prompts, preempting):
    layout = case(method).smallest
    exact = 0 if layout.exact is None else layout.exact.blocks + -(-48 // layout.exact.block_size) + 1
    few = {"max_model_len": 736, "num_gpu_blocks_override": -(-736 // layout.block_size) + exact + 2}
    with start(method, layout.block_size, max_num_batched_tokens=48, **few) as engine, preempting() as count:
        assert token_ids(engine.tokens(prompts)) == case(method).expected
        assert engine.free_blocks == engine.all_blocks
        assert count() > 2


def test_a_shared_prefix_of_different_prompts(case, start, prompts):
    """Sequences that share blocks while all of them run, and pack tokens of shared blocks again."""
    method = "kivi:sinks=32:recent=96"
    prefix = prompts[7][:300]
    with start(method, enable_prefix_caching=False) as engine:
        different = [prefix + prompts[i][:20] for i in range(6)]
        expected = token_ids(engine.tokens(different, (140,) * 6))
    with start(method) as engine:
        first = engine.tokens([different[0]], (140,))
        outputs = engine.tokens(different, (140,) * 6)
        assert token_ids(first) == expected[:1]
        assert all(output.num_cached_tokens == 288 for output in outputs)
        assert token_ids(outputs) == expected

"""A real model of 30 layers inside vLLM: its tokens, and how many tokens a memory holds."""

import pytest
from vllm_engines import generated, running

from kvq_cli import packaged
from kvq_cli.errors import KvqError
from kvq_cli.methods.registry import build_parsed
from kvq_cli.models import configured_shape, load_model
from kvq_cli.vllm.layout import cache_layout
from kvq_cli.vllm.served import ServedMethod

MEMORY = 64 << 20
LENGTHS, NEW = (5, 77, 200), (24, 16, 12)


@pytest.fixture(scope="module")
def folder():
    try:
        return packaged.model_folder(packaged.SMOLLM2)
    except KvqError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model("smollm2", "cpu", "float32")


@pytest.fixture(scope="module")
def prompts(loaded):
    """Text of different places."""
    text = (
        packaged.__doc__ + "The old harbour lies where the river meets the sea, and its walls are of grey stone. " * 30
    )
    ids = loaded.tokenizer(text)["input_ids"]
    return [ids[i : i + length] for i, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("method", ["kivi:sinks=32:recent=32"])
def test_tokens_of_a_real_model_equal_generate(method, folder, loaded, prompts):
    served = ServedMethod.of(build_parsed(method, bits=2))
    expected = generated(loaded.model, served.method, prompts, NEW)
    layout = cache_layout(served.plans(loaded.shape), loaded.shape)
    with running(folder, served, layout.block_size, max_num_batched_tokens=64) as engine:
        for _ in range(2):  # the second time with prefix hits
            outputs = engine.tokens(prompts, NEW)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert outputs[2].num_cached_tokens == len(prompts[2]) // layout.block_size * layout.block_size
        assert engine.free_blocks == engine.all_blocks


def test_two_bits_hold_five_times_the_tokens_of_16_bits(folder):
    shape, tokens = configured_shape("smollm2"), []
    for method in ("fp16", "kivi"):
        served = ServedMethod.of(build_parsed(method, bits=2))
        layout = cache_layout(served.plans(shape), shape)
        options = {"dtype": "float16", "kv_cache_memory_bytes": MEMORY, "max_num_batched_tokens": 64}
        with running(folder, served, layout.block_size, max_model_len=256, **options) as engine:
            assert engine.kv_cache_config.num_blocks == layout.blocks(MEMORY)
            tokens.append(engine.kv_cache_config.num_blocks * layout.block_size)
    assert tokens[1] >= 5 * tokens[0]

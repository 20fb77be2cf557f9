"""Layers with a sliding window stay in vLLM's own cache, in 16 bits: tokens equal `generate` with `local=16bit`."""

import shlex

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig
from vllm_engines import LOCAL, MEMORY, generated, running, token_ids

from kvq_cli import packaged
from kvq_cli.errors import KvqError
from kvq_cli.methods.registry import build_parsed
from kvq_cli.models import load_model
from kvq_cli.vllm.layout import cache_layout
from kvq_cli.vllm.local_layers import served_shape
from kvq_cli.vllm.served import ServedMethod

METHODS = (
    "fp16",
    "kivi:local=16bit:sinks=5:recent=32",
    "kivi:local=16bit:pre_rope=on:recent=0",
    "turboquant:local=16bit",
    "klt:local=16bit",
)
LAYERS, WINDOW = 7, 48


@pytest.fixture(scope="module")
def gemma():
    """A random Gemma 3 of 7 layers, of which the third and the sixth see all tokens."""
    torch.manual_seed(0)
    kinds = ["full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(LAYERS)]
    sizes = {"hidden_size": 128, "intermediate_size": 64, "head_dim": 64, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 64}
    windows = {"num_hidden_layers": LAYERS, "layer_types": kinds, "sliding_window": WINDOW}
    config = Gemma3TextConfig(**sizes, **heads, **windows, max_position_embeddings=1024)
    model = Gemma3ForCausalLM(config).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(std=1.5 * weight.shape[1] ** -0.5)
    model.model.embed_tokens.weight.mul_(0.1)  # the head has the same weights: else a token answers with itself
    return model


@pytest.fixture(scope="module")
def folder(gemma, tmp_path_factory):
    path = tmp_path_factory.mktemp("gemma")
    gemma.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def case(gemma, cases_of):
    return cases_of(gemma)


@pytest.fixture
def start(folder, case):
    def run(method, block_size=None, **options):
        one = case(method)
        return running(folder, one.served, block_size or one.layout.block_size, local=True, **options)

    return run


def check_groups(engine, layout):
    """Each group of layers has the planned pages, and the pool as many blocks as planned."""
    sizes = {"kvq": layout.block_size, "exact": layout.exact and layout.exact.block_size}
    found = {"local": 0, "kvq": 0, "exact": 0}
    for group in engine.kv_cache_config.kv_cache_groups:
        spec, exact = group.kv_cache_spec, any("kvq_exact" in name for name in group.layer_names)
        kind = "exact" if exact else "local" if hasattr(spec, "sliding_window") and spec.sliding_window else "kvq"
        assert spec.page_size_bytes == layout.page_bytes
        assert spec.block_size == (layout.local.block_size if kind == "local" else sizes[kind])
        found[kind] += 1
    assert found == {"local": 3, "kvq": 1, "exact": int(layout.exact is not None)}
    assert engine.kv_cache_config.num_blocks == layout.blocks(MEMORY) == MEMORY // (2 * layout.page_bytes)


@pytest.mark.parametrize("method", METHODS)
def test_concurrent_requests_and_prefix_hits_equal_generate(method, case, start, prompts):
    one = case(method)
    with start(method) as engine:
        check_groups(engine, one.layout)
        assert token_ids(engine.tokens(prompts)) == one.expected
        again = engine.tokens(prompts)
        assert token_ids(again) == one.expected
        size = one.layout.block_size
        assert [output.num_cached_tokens for output in again] == [(len(p) - 1) // size * size for p in prompts]
        assert engine.free_blocks == engine.all_blocks


@pytest.mark.parametrize("method", [METHODS[1], METHODS[4]])
def test_chunked_prefill_and_preemption_in_a_new_engine_equal_generate(method, case, start, prompts, preempting):
    one = case(method)
    # Beside the blocks of one sequence those of a step's 48 tokens: of three groups of local layers, of exact tokens.
    few = {"max_model_len": 736, "num_gpu_blocks_override": one.layout.blocks_of(736) + 4 * 3 + 2}
    with start(method, max_num_batched_tokens=48, **few) as engine, preempting() as count:
        assert token_ids(engine.tokens(prompts)) == one.expected
        assert engine.free_blocks == engine.all_blocks
        assert count() > 2


def test_the_printed_command_gives_vllm_the_options_of_these_engines(kvq, folder):
    from vllm.engine.arg_utils import AsyncEngineArgs

    from kvq_cli.vllm.parse import _parser

    result = kvq("serve", "--model", folder, "--method", "kivi", "--dry-run", "--quiet")
    assert result.exit_code == 0, result.stderr
    args = _parser().parse_args(shlex.split(result.stdout)[2:])
    args.model = args.model_tag
    engine = AsyncEngineArgs.from_cli_args(args)
    kinds = {kind: each.name for kind, each in engine.attention_config.backend_per_kind.items()}
    assert kinds == LOCAL["attention_config"]["backend_per_kind"]
    assert engine.attention_backend is None and engine.kv_cache_dtype_skip_layers == LOCAL["kv_cache_dtype_skip_layers"]


def test_tokens_of_gemma3_equal_generate():
    """The real model of 18 layers, of which 15 see 512 tokens, where it is installed."""
    try:
        folder = packaged.model_folder(packaged.GEMMA3_270M)
    except KvqError as error:
        pytest.skip(str(error))
    loaded, new = load_model("gemma3-270m", "cpu", "float32"), (10, 6)
    text = "The old harbour lies where the river meets the sea, and its walls are of grey stone. " * 40
    ids = loaded.tokenizer(packaged.__doc__ + text)["input_ids"]
    prompts = [ids[:90], ids[20:680]]
    served = ServedMethod.of(build_parsed("kivi:local=16bit:recent=32", bits=4))
    expected = generated(loaded.model, served.method, prompts, new)
    shape = served_shape(served.method, loaded.shape)
    layout = cache_layout(served.plans(shape), shape)
    del loaded
    with running(folder, served, layout.block_size, local=True, max_num_batched_tokens=256) as engine:
        for _ in range(2):  # the second time with prefix hits
            outputs = engine.tokens(prompts, new)
            assert token_ids(outputs) == expected
        size = layout.block_size
        assert [output.num_cached_tokens for output in outputs] == [len(p) // size * size for p in prompts]
        assert engine.kv_cache_config.num_blocks == layout.blocks(MEMORY)
        assert engine.free_blocks == engine.all_blocks

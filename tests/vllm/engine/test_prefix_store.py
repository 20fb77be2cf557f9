"""`KvqConnector` in vLLM: blocks of prompts that one engine stores and another one loads."""

import itertools
import shutil
from types import SimpleNamespace

import pytest
import torch
from random_artifacts import random_parts
from vllm_engines import generated, preempting, running

from kvq_cli.artifact import save_artifact
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build_parsed
from kvq_cli.vllm.prefix_store.settings import RAW, StoreSettings
from kvq_cli.vllm.served import ServedMethod

SIZE = 32
#: Prompt lengths of sixteen requests; the last eight begin as the first eight do.
LENGTHS = (5, 32, 33, 64, 100, 130, 161, 200)
COUNT = 6


@pytest.fixture(autouse=True)
def seed(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")


@pytest.fixture(scope="module")
def prompts():
    generator = torch.Generator().manual_seed(7)
    first = [torch.randint(3, 512, (length,), generator=generator).tolist() for length in LENGTHS]
    return first + [[*prompt, 7, 8, 9] for prompt in first]


@pytest.fixture(scope="module")
def expected(model, prompts):
    return generated(model, build_parsed("fp16"), prompts, (COUNT,) * len(prompts))


@pytest.fixture
def engine(folder):
    """`with engine(store, artifact, method="fp16") as running:` with kvq's pages; method None: with vLLM's own."""

    def start(store, artifact=RAW, method="fp16", **options):
        settings = StoreSettings(str(store), str(artifact), options.pop("size", "1GiB"))
        # FlexAttention in PyTorch computes every query with all of the cache.
        memory = {} if method else {"num_gpu_blocks_override": 100}
        options = {"max_num_seqs": 16, "kv_transfer_config": settings.transfer_config(), **memory, **options}
        served = None if method is None else ServedMethod(build_parsed(method, bits=2))
        return running(folder, served, SIZE, **options)

    return start


#: kvq's pages, and vLLM's own.
each_cache = pytest.mark.parametrize("method", ["fp16", None], ids=["kvq", "vllm"])


def answers(engine, prompts):
    """(the tokens of concurrent requests, how many of each prompt's tokens were not computed)."""
    outputs = engine.tokens(prompts, (COUNT,) * len(prompts))
    return [list(output.outputs[0].token_ids) for output in outputs], [output.num_cached_tokens for output in outputs]


def flush(engine):
    """Wait for the writer."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    get_kv_transfer_group().transfers.writer.flush()


def full_tokens(prompts):
    """Tokens of each prompt in full blocks, but for the last token, which vLLM computes."""
    return [(len(prompt) - 1) // SIZE * SIZE for prompt in prompts]


def files(folder):
    return sorted(folder.rglob("*.safetensors"))


@each_cache
def test_a_second_engine_loads_what_the_first_stored(engine, method, prompts, expected, tmp_path, monkeypatch):
    with engine(tmp_path, method=method) as first:
        assert answers(first, prompts)[0] == expected
    stored = files(tmp_path)  # the end of the engine waits for the writer
    assert len(stored) == sum(len(prompt) // SIZE for prompt in prompts[:8])
    assert not list(tmp_path.rglob("*.partial"))

    with engine(tmp_path, method=method, max_num_batched_tokens=48, max_num_seqs=8) as second:  # prompts in chunks
        tokens, cached = answers(second, prompts)
        assert tokens == expected and cached == full_tokens(prompts)
        with monkeypatch.context() as patch:
            preempted = preempting(patch, (4, 7))
            second.llm.reset_prefix_cache()
            assert answers(second, prompts)[0] == expected and preempted
        assert files(tmp_path) == stored

        # Damaged, foreign and lost files: computed again, with the same tokens, and stored again.
        for path, damage in zip(stored[::3], itertools.cycle(("cut", "flip", "swap", "lose")), strict=False):
            data = path.read_bytes()
            if damage == "lose":
                path.unlink()
            elif damage == "swap":
                shutil.copy(stored[1], path)
            else:
                path.write_bytes(data[:100] if damage == "cut" else data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        second.llm.reset_prefix_cache()
        tokens, cached = answers(second, prompts)
        assert tokens == expected and sum(cached) < sum(full_tokens(prompts))
        assert second.free_blocks == second.all_blocks
        second.llm.reset_prefix_cache()
        answers(second, prompts)
        flush(second)
        second.llm.reset_prefix_cache()
        assert answers(second, prompts) == (expected, full_tokens(prompts))


@pytest.fixture(scope="module")
def artifact(model, tmp_path_factory):
    """Codes of 4 bits."""
    path = tmp_path_factory.mktemp("artifact") / "klt"
    save_artifact(path, *random_parts(build_parsed("klt", bits=4), model), "card")
    return path


@pytest.mark.parametrize("codes", [False, True], ids=["raw", "codes"])
def test_a_load_into_16_bit_pages_of_vllm_gives_what_its_own_prefix_cache_gives(
    engine, artifact, codes, prompts, tmp_path
):
    """The same steps on the same bits; with codes, on the bits that an engine with the same codes loads."""
    options = {"artifact": artifact if codes else RAW, "method": None, "dtype": "bfloat16"}
    with engine(tmp_path, **options) as first:
        answers(first, prompts)
        flush(first)
        if codes:
            first.llm.reset_prefix_cache()
            answers(first, prompts)
        found = answers(first, prompts)
        assert found[1] == full_tokens(prompts)
        sizes = {path.stat().st_size for path in files(tmp_path)}
        assert max(sizes) > 2 * 2 * 2 * SIZE * 64 * 2  # layers, keys and values, heads: 16 bits
        assert max(sizes) > (3 if codes else 0) * min(sizes)
    with engine(tmp_path, **options) as second:
        assert answers(second, prompts) == found


@each_cache
def test_codes_of_4_bits_and_eviction(engine, artifact, method, prompts, tmp_path):
    """Answers after a load from codes do not depend on the engine; the folder does not outgrow its size."""
    store = tmp_path / "store"
    with engine(store, artifact, method) as first:
        answers(first, prompts)
        flush(first)
        sizes = sorted({path.stat().st_size for path in files(store)})
        assert len(sizes) == 2 and sizes[1] > 7 * sizes[0]  # float32: the first block, and 4 bits
        first.llm.reset_prefix_cache()
        tokens, cached = answers(first, prompts)
        assert cached == full_tokens(prompts)
    capacity = sum(path.stat().st_size for path in files(store)) * 5 // 4
    with engine(store, artifact, method, size=f"{capacity}B") as second:
        assert answers(second, prompts) == (tokens, cached)
        before = files(store)
        answers(second, [[9, *prompt] for prompt in prompts])
        flush(second)
        assert sum(path.stat().st_size for path in files(store)) <= capacity
        assert set(files(store)) - set(before) and set(before) - set(files(store))


@each_cache
def test_two_ranks_store_their_own_heads(engine, method, prompts, expected, tmp_path):
    """A block that one of them lost is computed again by both."""
    options = {"method": method, "tensor_parallel_size": 2}
    with engine(tmp_path, **options) as first:
        assert answers(first, prompts)[0] == expected
    stored = files(tmp_path)
    assert len(stored) == 2 * sum(len(prompt) // SIZE for prompt in prompts[:8])
    assert len({path.parent.parent for path in stored}) == 2
    sizes = [path.stat().st_size for path in stored]
    stored[1].write_bytes(stored[1].read_bytes()[:-1])  # of one rank
    with engine(tmp_path, **options) as second:
        tokens, cached = answers(second, prompts)
        assert (tokens, cached) == (expected, full_tokens(prompts))  # vLLM counts what it tried to load
        assert second.free_blocks == second.all_blocks
    assert files(tmp_path) == stored
    assert [path.stat().st_size for path in stored] == sizes  # written again


def test_pages_of_a_method_are_stored_as_they_are(engine, prompts, tmp_path):
    method = "turboquant"
    with engine(tmp_path, method=method) as first:
        tokens, _ = answers(first, prompts)
        flush(first)
        first.llm.reset_prefix_cache()
        assert answers(first, prompts) == (tokens, full_tokens(prompts))


def config(**changes):
    """What the connector reads of a configuration, as far as `_check` does."""
    model = SimpleNamespace(use_mla=False, uses_mrope=False, enable_sleep_mode=False)
    sizes = ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    parallel = SimpleNamespace(**dict.fromkeys(("tensor_parallel_size", *sizes), 1))
    transfer = SimpleNamespace(kv_role="kv_both", kv_load_failure_policy="recompute")
    parts = {"model_config": model, "parallel_config": parallel, "kv_transfer_config": transfer}
    for name, value in changes.items():
        for part in parts.values():
            if hasattr(part, name):
                setattr(part, name, value)
    return SimpleNamespace(**parts, **{name: changes.get(name) for name in ("lora_config", "speculative_config")})


def groups(count=1, **options):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(
        **{"block_size": SIZE, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16, **options}
    )
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)] * count)


@pytest.mark.parametrize(
    ("changes", "found", "message"),
    [
        ({}, {"count": 2}, "one kind of cache in all layers, and this engine has 2"),
        ({}, {"sliding_window": 8}, "a cache of full attention"),
        ({}, {"block_size": 16}, "hashes of whole blocks"),
        ({"use_mla": True}, {}, "MLA"),
        ({"uses_mrope": True}, {}, "M-RoPE"),
        ({"pipeline_parallel_size": 2}, {}, "no pipeline and context parallelism"),
        ({"enable_sleep_mode": True}, {}, "no --enable-sleep-mode: sleep level 2"),
        ({"kv_role": "kv_producer"}, {}, "kv_both"),
        ({"kv_load_failure_policy": "fail"}, {}, "recompute"),
        ({"lora_config": 1}, {}, "no --enable-lora"),
        ({"speculative_config": 1}, {}, "no speculative decoding"),
    ],
)
def test_refusals(changes, found, message):
    from kvq_cli.vllm.prefix_store.connector import _check

    _check(config(), groups(), SIZE)
    with pytest.raises(UsageError, match=message):
        _check(config(**changes), groups(**found), SIZE)


def test_hashes_that_may_differ_between_servers_are_refused(monkeypatch):
    from kvq_cli.vllm.prefix_store.connector import _check

    monkeypatch.delenv("PYTHONHASHSEED")
    with pytest.raises(UsageError, match="^set PYTHONHASHSEED to the same number[^\n]*$"):
        _check(config(), groups(), SIZE)

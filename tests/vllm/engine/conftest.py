"""A tiny model, its artifacts, what `generate` gives with them, and vLLM engines on a CPU in this process.

Needs vLLM and tests/vllm/platform: `make test-vllm`. Importing vLLM takes half a minute, an engine some seconds.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from typing import Any

import pytest
import torch
from random_artifacts import random_parts, tiny_model

from kvq_cli import attach, load_artifact
from kvq_cli.artifact import save_artifact
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.registry import build_parsed
from kvq_cli.models import model_shape
from kvq_cli.vllm.layout import CacheLayout, cache_layout
from kvq_cli.vllm.rope import unrotate
from kvq_cli.vllm.served import ServedMethod

# Read when vLLM is imported: one process, no network.
os.environ.update(KVQ_VLLM_CPU="1", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1")
os.environ.update(VLLM_LOGGING_LEVEL="ERROR", OMP_NUM_THREADS="1")

if "vllm" not in packages_distributions():  # find_spec would find this folder's parent
    collect_ignore_glob = ["test_*.py"]

#: Prompt lengths and new tokens of eight requests.
LENGTHS, NEW = (5, 77, 31, 32, 200, 333, 128, 700), (40, 24, 70, 33, 50, 40, 30, 20)
VOCABULARY = 512
#: Methods for which a code flips on these prompts, by the error with which vLLM rounds keys after RoPE. One code is
#: enough: the model and its codebooks are random.
ROUNDED = ("temporalkv:outliers=0.01:hybrid=head",)


@pytest.fixture(scope="session")
def model():
    """A random Llama of 2 layers, 2 kv heads of 64."""
    sizes = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 64}
    return tiny_model(**sizes, vocab_size=VOCABULARY, max_position_embeddings=1024)


@pytest.fixture(scope="session")
def folder(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


@dataclass(frozen=True)
class Case:
    """A method of the tiny model, planned for a server, and the tokens that `generate` gives for the prompts."""

    served: ServedMethod
    shape: ModelShape
    layout: CacheLayout
    expected: list[list[int]]

    @property
    def smallest(self) -> CacheLayout:
        """The smallest blocks, which fill up and are freed most often."""
        for size in range(16, 1024, 16):
            with suppress(UsageError):
                return cache_layout(self.served.plans(self.shape), self.shape, size)
        raise ValueError("no block size fits")


@pytest.fixture(scope="session")
def case(model, prompts, tmp_path_factory) -> Callable[[str], Case]:
    """`case("kivi:sinks=32")`, 2 bits, with a random artifact where the method needs one."""
    made: dict[str, Case] = {}

    def get(text: str) -> Case:
        if text not in made:
            method: Any = build_parsed(text, bits=2)
            if method.calibrates:
                config, tensors = random_parts(method, model)
                path = tmp_path_factory.mktemp("artifact") / "it"
                save_artifact(path, config, tensors, "card")
                method = load_artifact(path)
            served, shape = ServedMethod.of(method), model_shape(model)
            layout = cache_layout(served.plans(shape), shape)
            made[text] = Case(served, shape, layout, _generate(model, method, prompts, text in ROUNDED))
        return made[text]

    return get


def _generate(model: Any, attachable: Any, prompts: list[list[int]], rounded: bool) -> list[list[int]]:
    """Greedy tokens of each prompt alone. Compressed prefill: every token sees what it would see decoded alone, which
    does not depend on how a scheduler cuts a prompt. rounded: keys are un-rotated keys after RoPE, as in vLLM."""
    tokens = []
    with attach(model, attachable, prefill="compressed") as attached, pytest.MonkeyPatch.context() as patch:
        if rounded:
            patch.setattr(CompressedLayer, "update", _update_with_unrotated_keys(CompressedLayer.update))
        for prompt, count in zip(prompts, NEW, strict=True):
            cache, ids = attached.new_cache(), torch.tensor([prompt])
            options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            tokens.append(model.generate(ids, past_key_values=cache, **options)[0, len(prompt) :].tolist())
    return tokens


def _update_with_unrotated_keys(update: Callable) -> Callable:
    def patched(layer: CompressedLayer, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layer.capture_key(unrotate(layer.rotation, key, layer.columns))
        return update(layer, key, value, *args, **kwargs)

    return patched


class RunningEngine:
    """An `LLM` and the parts of it that tests look at."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        core = llm.llm_engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.kv_cache_config = core.model_executor.driver_worker.worker.model_runner.kv_cache_config

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def all_blocks(self) -> int:
        """All but the null block."""
        return self.kv_cache_config.num_blocks - 1

    def tokens(self, prompts: list[list[int]], new: tuple[int, ...] = NEW, **options: Any) -> list[Any]:
        """vLLM's outputs of concurrent requests, greedy."""
        from vllm import SamplingParams

        greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False, **options}
        parameters = [SamplingParams(max_tokens=count, **greedy) for count in new]
        return self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], parameters, use_tqdm=False)


@contextmanager
def running(folder: Any, served: ServedMethod, block_size: int, **options: Any) -> Iterator[RunningEngine]:
    """An engine with 64 MiB of cache, unless `options` say otherwise."""
    from vllm import LLM

    llm: Any = LLM(
        model=str(folder),
        enforce_eager=True,
        kv_cache_dtype="kvq",
        block_size=block_size,
        attention_config={"backend": "CUSTOM"},
        additional_config=served.additional_config(),
        disable_log_stats=True,
        **{
            "skip_tokenizer_init": True,
            "dtype": "float32",
            "kv_cache_memory_bytes": 64 << 20,
            "max_model_len": 1024,
            "max_num_seqs": 8,
            **options,
        },
    )
    try:
        yield RunningEngine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


@pytest.fixture
def start(folder, case) -> Callable[..., Any]:
    """`with start("kivi", max_num_seqs=4) as engine:`."""

    def run(text: str, block_size: int | None = None, **options: Any) -> Any:
        one = case(text)
        return running(folder, one.served, block_size or one.layout.block_size, **options)

    return run

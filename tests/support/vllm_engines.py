"""vLLM engines on a CPU in this process, and what `generate` gives for the same prompts."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from kvq_cli import attach
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.vllm.rope import unrotate
from kvq_cli.vllm.served import ServedMethod

#: Whether engines have vLLM's V2 runner: see `test_v2_runner.py`.
V2 = os.environ.get("KVQ_TEST_V2") == "1"
#: Bytes of an engine's cache.
MEMORY = 64 << 20
#: Options of requests with several samples, alike: V2's kernel of top-k does not run in Triton's interpreter.
SAMPLED = {"n": 4, "temperature": 1} | ({"min_p": 1.0} if V2 else {"top_k": 1})
#: `LOCAL_FLAGS` as options.
LOCAL = {
    "attention_config": {"backend_per_kind": {"full_attention": "CUSTOM"}},
    "kv_cache_dtype_skip_layers": ["sliding_window"],
}
#: Prompt lengths and new tokens of eight requests.
LENGTHS, NEW = (5, 77, 31, 32, 200, 333, 128, 700), (40, 24, 70, 33, 50, 40, 30, 20)


def generated(
    model: Any, attachable: Any, prompts: list[list[int]], new: tuple[int, ...], rounded: bool = False
) -> list[list[int]]:
    """Greedy tokens of each prompt alone. Compressed prefill: every token sees what it would see decoded alone, which
    does not depend on how a scheduler cuts a prompt. rounded: keys are un-rotated keys after RoPE, as in vLLM."""
    tokens = []
    with attach(model, attachable, prefill="compressed") as attached, pytest.MonkeyPatch.context() as patch:
        if rounded:
            patch.setattr(CompressedLayer, "update", _update_with_unrotated_keys(CompressedLayer.update))
        for prompt, count in zip(prompts, new, strict=True):
            cache, ids = attached.new_cache(), torch.tensor([prompt])
            options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
            tokens.append(model.generate(ids, past_key_values=cache, **options)[0, len(prompt) :].tolist())
    return tokens


def _update_with_unrotated_keys(update: Callable) -> Callable:
    def patched(layer: CompressedLayer, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        layer.capture_key(unrotate(layer.rotation, key, torch.arange(layer.columns, layer.columns + key.shape[-2])))
        return update(layer, key, value, *args, **kwargs)

    return patched


def preempting(patch: pytest.MonkeyPatch, steps: tuple[int, ...]) -> list[str]:
    """Let vLLM preempt all requests before these steps, counted from now; returns a list that the names of preempted
    requests are added to. Few blocks alone preempt requests of some methods only."""
    from vllm.v1.core.sched.scheduler import Scheduler

    preempted, count = [], itertools.count(1)
    preempt, schedule = Scheduler._preempt_request, Scheduler.schedule

    def counting(self: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    def resetting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if next(count) in steps:
            self.reset_prefix_cache(reset_running_requests=True)
        return schedule(self, *args, **kwargs)

    patch.setattr(Scheduler, "_preempt_request", counting)
    patch.setattr(Scheduler, "schedule", resetting)
    return preempted


def token_ids(outputs: list[Any]) -> list[list[int]]:
    """The tokens of vLLM's outputs."""
    return [list(output.outputs[0].token_ids) for output in outputs]


class RunningEngine:
    """An `LLM` and the parts of it that tests look at."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        core = llm.llm_engine.engine_core.engine_core
        if worker := getattr(core.model_executor, "driver_worker", None):  # of one process
            runner = type(worker.worker.model_runner).__mro__
            assert any(each.__module__ == "vllm.v1.worker.gpu.model_runner" for each in runner) == V2
        self.scheduler = core.scheduler
        self.kv_cache_config = core.scheduler.kv_cache_config

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
def running(
    folder: Any, served: ServedMethod | None, block_size: int, local: bool = False, **options: Any
) -> Iterator[RunningEngine]:
    """An engine with 64 MiB of cache, unless `options` say otherwise. served: None for vLLM's own cache, in the model's
    dtype, and its FlexAttention. local: some layers have a sliding window."""
    from vllm import LLM

    method: dict[str, Any] = {"attention_config": {"backend": "FLEX_ATTENTION"}}
    if served is not None:
        method = LOCAL if local else {"attention_config": {"backend": "CUSTOM"}}
        method = {**method, "kv_cache_dtype": "kvq", "additional_config": served.additional_config()}
    llm: Any = LLM(
        model=str(folder),
        enforce_eager=True,
        block_size=block_size,
        disable_log_stats=True,
        **{
            **method,
            "skip_tokenizer_init": True,
            **({"kernel_config": {"enable_jit_warmup": False}} if V2 else {}),
            "dtype": "float32",
            "kv_cache_memory_bytes": MEMORY,
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

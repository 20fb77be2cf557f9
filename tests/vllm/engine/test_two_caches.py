"""vLLM measures CUDA graphs with a small cache that it throws away before it makes the real one."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvq_cli.vllm.backend import KvqImpl


def layers_of(runner):
    """The layers with a cache, those of exact tokens among them."""
    return [layer for layer in runner.compilation_config.static_forward_context.values() if hasattr(layer, "kv_cache")]


@pytest.mark.parametrize("method", ["kivi:sinks=32:recent=96", "turboquant", "klt"])
def test_the_real_cache_is_used_after_a_thrown_away_one(method, case, start, prompts, monkeypatch):
    """As `profile_cudagraph_memory` on a GPU: a cache of four blocks, steps in it, then the real cache, which is read
    and written. The memory of the first is free before the second is made."""
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda *_: None)
    measure, allocate = CPUWorker.determine_available_memory, GPUModelRunner.initialize_kv_cache_tensors
    thrown_away = []

    def with_a_small_cache(worker):
        runner = worker.model_runner
        graphs = runner.compilation_config
        monkeypatch.setattr(graphs, "max_cudagraph_capture_size", 4)  # a block for each request of a step
        with set_current_vllm_config(runner.vllm_config):
            runner._init_minimal_kv_cache_for_profiling()
        for _ in range(2):
            runner._dummy_run(4, cudagraph_runtime_mode=CUDAGraphMode.NONE, force_attention=True)
        impls = [layer.impl for layer in layers_of(runner) if isinstance(getattr(layer, "impl", None), KvqImpl)]
        assert impls and all(impl.layer is not None for impl in impls)
        thrown_away.extend(StorageWeakRef(layer.kv_cache.untyped_storage()) for layer in layers_of(runner))
        runner._cleanup_profiling_kv_cache()
        return measure(worker)

    def allocate_later(runner, *args, **kwargs):
        gc.collect()
        assert all(storage.expired() for storage in thrown_away)
        return allocate(runner, *args, **kwargs)

    monkeypatch.setattr(CPUWorker, "determine_available_memory", with_a_small_cache)
    monkeypatch.setattr(GPUModelRunner, "initialize_kv_cache_tensors", allocate_later)
    with start(method) as engine:
        outputs = engine.tokens(prompts)
        runner = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        assert thrown_away and all(layer.kv_cache.any() for layer in layers_of(runner))
    assert [list(output.outputs[0].token_ids) for output in outputs] == case(method).expected

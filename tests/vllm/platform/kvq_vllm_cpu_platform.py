"""vLLM's CUDA build on a CPU: the six compiled operations that its CPU runner calls, in PyTorch."""

import os

import torch
from torch import Tensor
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform

_library: torch.library.Library | None = None


def _slot_mapping(starts: Tensor, positions: Tensor, table: Tensor, slots: Tensor, block_size: int) -> None:
    count = int(starts[-1])
    request = torch.searchsorted(starts[1:].long(), torch.arange(count), right=True)
    position = positions[:count]
    slots[:count] = table[request, position // block_size].long() * block_size + position % block_size
    slots[count:] = -1


def _gumbel_argmax(logits: Tensor, seeds: Tensor) -> Tensor:
    rows = []
    for row, seed in zip(logits, seeds.tolist(), strict=True):
        generator = torch.Generator().manual_seed(seed)
        rows.append((row - torch.empty_like(row).exponential_(generator=generator).log()).argmax())
    return torch.stack(rows)


def _packed_linear(output: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, packed: bool) -> None:
    output.copy_(torch.nn.functional.linear(x, weight, None if bias is None else bias.to(x.dtype)))


def define_operations() -> None:
    """Define the operations once in this process."""
    global _library
    if _library is not None:
        return
    _library = torch.library.Library("_C", "FRAGMENT")
    _library.define("init_cpu_memory_env(int[] nodes) -> ()")
    _library.define(
        "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor table, Tensor(a!) slots, "
        "int block_size) -> ()"
    )
    _library.define("fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor")
    _library.define("greedy_argmax(Tensor x) -> Tensor")
    # Called for small bfloat16 weights where the processor has AMX.
    _library.define("convert_weight_packed(Tensor weight) -> Tensor")
    _library.define("weight_packed_linear(Tensor(a!) output, Tensor x, Tensor weight, Tensor? bias, bool packed) -> ()")
    _library.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
    _library.impl("compute_slot_mapping_kernel_impl", _slot_mapping, "CPU")
    _library.impl("fused_gumbel_argmax", _gumbel_argmax, "CPU")
    _library.impl("greedy_argmax", lambda x: x.argmax(dim=-1), "CPU")
    _library.impl("convert_weight_packed", lambda weight: weight.clone(), "CPU")
    _library.impl("weight_packed_linear", _packed_linear, "CPU")


class CpuTestPlatform(CpuPlatform):
    @classmethod
    def import_kernels(cls):
        define_operations()

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        # Imported here: vllm.config asks for the platform while it is imported.
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        custom = AttentionBackendEnum.CUSTOM
        if selected_backend is None and attn_selector_config.kv_cache_dtype == "auto":
            return "kvq_vllm_cpu_attention.LocalBackend"
        if not custom.get_class().supports_kv_cache_dtype(attn_selector_config.kv_cache_dtype):
            raise ValueError(f"this platform serves with kvq's cache types only: {attn_selector_config.kv_cache_dtype}")
        return custom.get_path()

    @classmethod
    def update_block_size_for_backend(cls, vllm_config):
        Platform.update_block_size_for_backend.__func__(cls, vllm_config)  # as GPUs do

    @classmethod
    def check_and_update_config(cls, vllm_config):
        from vllm.config import CompilationMode

        define_operations()
        super().check_and_update_config(vllm_config)
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            # Workers of an engine in this process: copies of it need not import vLLM, a quarter of a minute each.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        # vLLM binds each worker to a NUMA node of its own: more workers than nodes are not allowed.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.custom_ops = ["none"]

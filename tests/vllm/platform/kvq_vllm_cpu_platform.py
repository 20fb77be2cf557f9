"""vLLM's CUDA build on a CPU: the compiled operations that its CPU runner and its FlexAttention call, in PyTorch."""

import os

import torch
from torch import Tensor
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform

_libraries: list[torch.library.Library] = []
_registered: list[bool] = []


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


def _accept_greedy(
    output: Tensor, ends: Tensor, drafted: Tensor, expected: Tensor, bonus: Tensor, greedy: Tensor | None, _most: int
) -> None:
    """The tokens of each request: those drafted as expected, then the first expected one that was not, or the bonus."""
    for row, stop in enumerate(ends.tolist()):
        if greedy is not None and not greedy[row]:
            continue
        start = int(ends[row - 1]) if row else 0
        right = int((drafted[start:stop] == expected[start:stop]).long().cumprod(0).sum())
        tokens = torch.cat([expected[start:stop], bonus[row].view(1)])[: right + 1]
        output[row, : len(tokens)] = tokens


def _write_tokens(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor, dtype: str, *scales: Tensor
) -> None:
    """keys, values: the cache, `[pages, tokens, kv_heads, head_dim]`."""
    slots = slots[slots >= 0]
    places = slots // keys.shape[1], slots % keys.shape[1]
    keys[places], values[places] = key[: len(slots)], value[: len(slots)]


def define_operations() -> None:
    """Define the operations once in this process."""
    if _libraries:
        return
    library, caches = (torch.library.Library(name, "FRAGMENT") for name in ("_C", "_C_cache_ops"))
    _libraries.extend((library, caches))
    caches.define(
        "reshape_and_cache_flash(Tensor key, Tensor value, Tensor(a!) keys, Tensor(b!) values, Tensor slots, "
        "str dtype, Tensor key_scale, Tensor value_scale) -> ()"
    )
    caches.impl("reshape_and_cache_flash", _write_tokens, "CPU")
    library.define("init_cpu_memory_env(int[] nodes) -> ()")
    library.define(
        "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor table, Tensor(a!) slots, "
        "int block_size) -> ()"
    )
    library.define("fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor")
    library.define("greedy_argmax(Tensor x) -> Tensor")
    library.define(
        "rejection_greedy_sample_kernel_impl(Tensor(a!) output, Tensor ends, Tensor drafted, Tensor expected, "
        "Tensor bonus, Tensor? greedy, int most) -> ()"
    )
    # Called for small bfloat16 weights where the processor has AMX.
    library.define("convert_weight_packed(Tensor weight) -> Tensor")
    library.define("weight_packed_linear(Tensor(a!) output, Tensor x, Tensor weight, Tensor? bias, bool packed) -> ()")
    library.impl("init_cpu_memory_env", lambda nodes: None, "CompositeExplicitAutograd")
    library.impl("compute_slot_mapping_kernel_impl", _slot_mapping, "CPU")
    library.impl("fused_gumbel_argmax", _gumbel_argmax, "CPU")
    library.impl("rejection_greedy_sample_kernel_impl", _accept_greedy, "CPU")
    library.impl("greedy_argmax", lambda x: x.argmax(dim=-1), "CPU")
    library.impl("convert_weight_packed", lambda weight: weight.clone(), "CPU")
    library.impl("weight_packed_linear", _packed_linear, "CPU")


def do_not_compile_flex_attention() -> None:
    """Let vLLM's FlexAttention run operation by operation: to compile it takes longer than what a test computes."""
    from torch.nn.attention import flex_attention
    from vllm.v1.attention.backends import flex_attention as backend

    flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    backend.flex_attention_compiled = flex_attention.flex_attention


class CpuTestPlatform(CpuPlatform):
    @classmethod
    def import_kernels(cls):
        define_operations()

    @classmethod
    def register_triton_kernel_overrides(cls):
        # Once in a process: vLLM looks for its kernels in all modules, and fails at those of numba, which n-gram drafts
        # import.
        if not _registered:
            super().register_triton_kernel_overrides()
            _registered.append(True)

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        # Imported here: vllm.config asks for the platform while it is imported.
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        chosen = selected_backend or AttentionBackendEnum.CUSTOM
        if selected_backend is None and attn_selector_config.kv_cache_dtype == "auto":
            return "kvq_vllm_cpu_attention.LocalBackend"
        if not chosen.get_class().supports_kv_cache_dtype(attn_selector_config.kv_cache_dtype):
            raise ValueError(f"{chosen.name} has no caches of {attn_selector_config.kv_cache_dtype}")
        if chosen == AttentionBackendEnum.FLEX_ATTENTION:
            do_not_compile_flex_attention()
        return chosen.get_path()

    @classmethod
    def update_block_size_for_backend(cls, vllm_config):
        Platform.update_block_size_for_backend.__func__(cls, vllm_config)  # as GPUs do

    @classmethod
    def check_and_update_config(cls, vllm_config):
        from vllm.config import CompilationMode

        define_operations()
        scheduler = vllm_config.scheduler_config
        asynchronous = scheduler.async_scheduling
        super().check_and_update_config(vllm_config)
        if os.environ.get("KVQ_VLLM_ASYNC") == "1":
            # As on a GPU: vLLM's CPU platform schedules a step when the last one has ended.
            scheduler.async_scheduling = asynchronous
        if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
            # Workers of an engine in this process: copies of it need not import vLLM, a quarter of a minute each.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        # vLLM binds each worker to a NUMA node of its own: more workers than nodes are not allowed.
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        vllm_config.compilation_config.mode = CompilationMode.NONE
        vllm_config.compilation_config.custom_ops = ["none"]

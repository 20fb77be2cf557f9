"""`KvqConnector`: vLLM's interface to a prefix store.

The scheduler asks which blocks of a prompt have files, and says in each step which blocks to load and to store
(`planning.py`). A worker loads before the step and stores after it: it packs the blocks where they lie, copies their
bytes to the host, and a thread writes them (`transfers.py`). vLLM computes what cannot be loaded.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tp_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvq_cli.artifact import Artifact
from kvq_cli.codecs.layout import dtype_name
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import ModelShape
from kvq_cli.vllm import rope
from kvq_cli.vllm.checks import REFUSED_FLAGS
from kvq_cli.vllm.engine import Engine, moved, plain_defaults
from kvq_cli.vllm.prefix_store.identity import fingerprint, model_identity
from kvq_cli.vllm.prefix_store.pages import ExactPages, Sides, kvq_sides, packed_pages, stock_sides
from kvq_cli.vllm.prefix_store.planning import Planner, PromptStep
from kvq_cli.vllm.prefix_store.records import ExactBlocks, PackedBlocks, coded_records, exact_records
from kvq_cli.vllm.prefix_store.settings import StoreSettings
from kvq_cli.vllm.prefix_store.store import PrefixStore
from kvq_cli.vllm.prefix_store.transfers import Transfers
from kvq_cli.vllm.prepare import check_weights
from kvq_cli.vllm.served import ServedMethod, cache_dtypes
from kvq_cli.vllm.shard import Shard


@dataclass
class StepMetadata(KVConnectorMetadata):
    prompts: list[PromptStep] = field(default_factory=list)


class KvqConnector(KVConnectorBase_V1, SupportsHMA):
    """Connects one process, the scheduler's or a worker's, to a prefix store."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._size = vllm_config.cache_config.block_size
        _check(vllm_config, kv_cache_config, self._size)
        settings = StoreSettings.of_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        self._codes = settings.load_codes()
        marks = _fingerprints(vllm_config, self._size, self._codes)
        self._stores = [PrefixStore(Path(settings.folder), mark, settings.capacity) for mark in marks]
        self._planner = Planner(self._stores, self._size)
        #: A worker's, once it has caches.
        self.transfers: Transfers | None = None
        if role == KVConnectorRole.WORKER:
            self._own.check_writable()

    @property
    def _own(self) -> PrefixStore:
        """Return the store of this worker's rank."""
        return self._stores[get_tensor_model_parallel_rank() if len(self._stores) > 1 else 0]

    @property
    def requires_kv_delivery(self) -> bool:
        """Return False: a block that is not stored is computed again."""
        return False

    # The scheduler's.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return self._planner.matched(request, num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._planner.begin(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        new, running = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        computed = {each.req_id: each.num_computed_tokens for each in new}
        computed |= dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
        return StepMetadata(self._planner.steps(computed, scheduler_output.num_scheduled_tokens, self._blocks_of))

    def _blocks_of(self, name: str) -> Sequence[int]:
        assert self._kv_cache_manager is not None
        (blocks,) = self._kv_cache_manager.get_block_ids(name)
        return blocks

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._planner.end(request.request_id)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids)

    def reset_cache(self) -> bool:
        """Return False, "not reset": files belong to the weights on disk, and other servers may use them."""
        return False

    # A worker's.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        self.shutdown()
        names = sorted(kv_caches, key=extract_layer_index)
        with plain_defaults():
            blocks = _blocks(self._vllm_config, [kv_caches[name] for name in names], names, self._codes)
        self.transfers = Transfers(self._own, blocks, self._size, _least if len(self._stores) > 1 else list)
        atexit.register(self.shutdown)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self.transfers is not None:
            self.transfers.load(self._prompts)

    def wait_for_save(self) -> None:
        if self.transfers is not None:
            self.transfers.store(self._prompts)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return set() if self.transfers is None else self.transfers.take_failed()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all layers were loaded before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: all layers are stored after the step."""

    def shutdown(self) -> None:
        """Write what waits."""
        if self.transfers is not None:
            self.transfers.writer.close()
            self.transfers = None
            atexit.unregister(self.shutdown)

    @property
    def _prompts(self) -> list[PromptStep]:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata.prompts


def _least(numbers: list[int]) -> list[int]:
    """Return the least of all ranks' numbers, place by place."""
    least = torch.tensor(numbers, device="cpu")
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN, get_tp_group().cpu_group)
    return least.tolist()


def _check(config: VllmConfig, kv_cache_config: Any, block_size: int) -> None:
    """Raise UsageError for what a prefix store cannot serve, or what would give wrong blocks."""
    model, parallel, transfer = config.model_config, config.parallel_config, config.kv_transfer_config
    if os.environ.get("PYTHONHASHSEED") is None:
        raise UsageError(
            "set PYTHONHASHSEED to the same number, such as 0, for every server that shares the prefix store: vLLM's "
            "hashes of blocks depend on it"
        )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UsageError(
            f"the prefix store needs one kind of cache in all layers, and this engine has {len(groups)}: serve a model "
            "without sliding windows, and a method without tokens in full precision"
        )
    spec = groups[0].kv_cache_spec
    reasons = {
        "a cache of full attention": not isinstance(spec, FullAttentionSpec) or spec.sliding_window is not None,
        "keys and values, which latent attention (MLA) does not cache": model.use_mla,
        "positions in the text, which M-RoPE does not have": model.uses_mrope,
        "no --enable-lora: hashes of blocks name an adapter, not its weights": config.lora_config is not None,
        f"no --enable-sleep-mode: {REFUSED_FLAGS['--enable-sleep-mode'][0]}": model.enable_sleep_mode,
        "no speculative decoding": config.speculative_config is not None,
        "no pipeline and context parallelism": max(
            parallel.pipeline_parallel_size,
            parallel.decode_context_parallel_size,
            parallel.prefill_context_parallel_size,
        )
        > 1,
        "hashes of whole blocks": spec.block_size != block_size,
        '"kv_role": "kv_both" in --kv-transfer-config': transfer.kv_role != "kv_both",
        '"kv_load_failure_policy": "recompute" in --kv-transfer-config': transfer.kv_load_failure_policy != "recompute",
    }
    for need, lacks in reasons.items():
        if lacks:
            raise UsageError(f"the prefix store needs {need}")


def _fingerprints(config: VllmConfig, block_size: int, codes: Artifact | None) -> list[str]:
    """Return a fingerprint for each rank. They must not depend on the process that computes them."""
    model, cache, ranks = config.model_config, config.cache_config, config.parallel_config.tensor_parallel_size
    others = {
        "model": model_identity(model.model, model.revision),
        "config": [model.hf_config_path, model.hf_overrides],
        "quantization": model.quantization,
        "codes": None if codes is None else codes.digest,
        "cache": None,
    }
    if "longrope" in json.dumps(model.hf_text_config.to_dict(), default=str):
        others["max_model_len"] = model.max_model_len  # vLLM chooses the factors of RoPE by it
    if cache.cache_dtype in cache_dtypes():
        served = ServedMethod.of_flags(cache.cache_dtype, config.additional_config)
        # Pages of fp16 hold the keys and values that vLLM's own pages hold.
        if served.method.name != "fp16":
            digest = None if served.artifact is None else served.artifact.digest
            others |= {"cache": [served.additional_config(), digest]}
    return [fingerprint(rank, ranks, block_size, dtype_name(model.dtype), **others) for rank in range(ranks)]


def _blocks(
    config: VllmConfig, caches: Sequence[Tensor], names: Sequence[str], codes: Artifact | None
) -> ExactBlocks | PackedBlocks:
    """Return the blocks of this rank's caches, layer by layer. names: vLLM's, of the layers."""
    model, size = config.model_config, config.cache_config.block_size
    text, ranks, device = model.hf_text_config, config.parallel_config.tensor_parallel_size, caches[0].device
    head_dim, layers, dtype = model.get_head_size(), text.num_hidden_layers, dtype_name(model.dtype)
    if len(caches) != layers:
        raise UsageError(f"the prefix store needs a cache in each of the {layers} layers, and there are {len(caches)}")
    heads = text.num_attention_heads, model.get_total_num_kv_heads()
    whole = ModelShape(layers, *heads, head_dim, text.hidden_size, dtype)
    shard = Shard(get_tensor_model_parallel_rank() if ranks > 1 else 0, ranks)
    shape = shard.shape(whole)
    if config.cache_config.cache_dtype in cache_dtypes():
        engine = Engine.current
        assert engine is not None
        if ServedMethod.of_flags(config.cache_config.cache_dtype, config.additional_config).method.name != "fp16":
            if codes is not None:
                raise UsageError("the prefix store keeps pages of kvq's methods as they are: give no artifact, but raw")
            return PackedBlocks(packed_pages(caches))
        sides: list[Sides] = kvq_sides(caches, engine.layout)
    else:
        context = config.compilation_config.static_forward_context
        backends = [context[name].get_attn_backend().get_name() for name in names]
        sides = [
            stock_sides(cache, backend, shape.kv_heads, head_dim, model.dtype)
            for cache, backend in zip(caches, backends, strict=True)
        ]
    pages, exact = ExactPages(sides, size), exact_records(shape, size, rope.unrotated(head_dim))
    if codes is None:
        return ExactBlocks(pages, exact, exact, 0)
    codes.check_config(model.hf_config, model.model)
    if shard.rank == 0:  # one rank reads the weights of all heads
        with torch.device("cpu"):
            check_weights(codes, model.hf_config, model.model, model.model, model.trust_remote_code, model.revision)
    with torch.device("cpu"):
        rotations = [moved(each, device) for each in rope.layer_rotations(model.hf_config, head_dim)]
        rope.check_tables(rotations, model.max_model_len)
    plans = ServedMethod.of(codes).plans(whole, device, shard)
    sinks = max(stream.window.sinks for plan in plans for stream in plan.kept)
    return ExactBlocks(pages, exact, coded_records(plans, shape, size, rotations), -(-sinks // size))

"""`KvqConnector`: vLLM's interface to a prefix store.

The scheduler asks which blocks of a prompt have files, and says in each step which blocks to load and to store. A
worker loads before the step and stores after it: it packs the blocks where they lie, copies their bytes to the host,
and a thread writes them. What cannot be loaded is reported, and vLLM computes it.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
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
from kvq_cli.vllm.engine import Engine, moved, plain_defaults
from kvq_cli.vllm.prefix_store.identity import fingerprint, model_identity
from kvq_cli.vllm.prefix_store.pages import ExactPages, Sides, kvq_sides, packed_pages, stock_sides
from kvq_cli.vllm.prefix_store.records import ExactBlocks, PackedBlocks, coded_records, exact_records
from kvq_cli.vllm.prefix_store.settings import StoreSettings
from kvq_cli.vllm.prefix_store.store import PrefixStore
from kvq_cli.vllm.prefix_store.validity import Validity
from kvq_cli.vllm.prefix_store.writer import Writer
from kvq_cli.vllm.prepare import check_weights
from kvq_cli.vllm.served import ServedMethod, cache_dtypes
from kvq_cli.vllm.shard import Shard


@dataclass(frozen=True)
class PromptStep:
    """A prompt in a step of the engine.

    blocks:   vLLM's blocks of its first tokens, up to the last that the step computes. keys: hashes of full blocks.
    computed: tokens that are not computed in this step. load, store: which of the full blocks to load before it, and
              to store after it.
    """

    blocks: list[int]
    keys: list[bytes]
    computed: int
    load: range
    store: list[int]


@dataclass
class StepMetadata(KVConnectorMetadata):
    prompts: list[PromptStep] = field(default_factory=list)


class KvqConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector of one process: the scheduler's, or a worker's."""

    _cache_hit_source = CacheHitSource.DISK

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._size = vllm_config.cache_config.block_size
        _check(vllm_config, kv_cache_config, self._size)
        settings = StoreSettings.of_extra_config(self._kv_transfer_config.kv_connector_extra_config)
        self._codes = settings.load_codes()
        folder, ranks = Path(settings.folder), vllm_config.parallel_config.tensor_parallel_size
        marks = _fingerprints(vllm_config, self._size, self._codes)
        self._stores = [PrefixStore(folder, mark, settings.capacity) for mark in marks]
        # The scheduler's: requests that run, and the tokens that each loads in the next step.
        self._requests: dict[str, Any] = {}
        self._loads: dict[str, int] = {}
        # A worker's.
        self._blocks: ExactBlocks | PackedBlocks | None = None
        self._validity, self._failed = Validity(), set[int]()
        self._writer: Writer | None = None
        if role == KVConnectorRole.WORKER:
            self._store = self._stores[get_tensor_model_parallel_rank() if ranks > 1 else 0]
            self._store.check_writable()
            self._writer = Writer(self._store)
            atexit.register(self._writer.close)

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that is not stored is computed again."""
        return False

    # The scheduler's.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        first = index = num_computed_tokens // self._size
        last = (request.num_tokens - 1) // self._size  # vLLM computes at least one token
        while index < last and self._is_stored(request.block_hashes[index]):
            index += 1
        return (index - first) * self._size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        self._loads[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        new, running = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        computed = {each.req_id: each.num_computed_tokens for each in new}
        computed |= dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
        metadata = StepMetadata()
        for name, tokens in computed.items():
            if tokens < self._requests[name].num_prompt_tokens or self._loads.get(name):
                end = tokens + scheduler_output.num_scheduled_tokens[name]
                metadata.prompts.append(self._prompt_step(name, tokens, end))
        self._loads.clear()
        return metadata

    def _prompt_step(self, name: str, computed: int, end: int) -> PromptStep:
        """computed, end: tokens before and after the step, those that it loads counted as computed."""
        request, begins = self._requests[name], name in self._loads
        assert self._kv_cache_manager is not None
        (blocks,) = self._kv_cache_manager.get_block_ids(name)
        full = min(end, request.num_prompt_tokens) // self._size
        done = computed // self._size
        load = range(done - self._loads.get(name, 0) // self._size, done)
        # Blocks that were in vLLM's cache when the prompt began may have left the store, or be of an answer.
        wanted = range(0 if begins else done, full)
        keys = [bytes(key) for key in request.block_hashes[: max(full, done)]]  # a resumed request may load its answer
        store = [index for index in wanted if index not in load and not self._is_stored(keys[index])]
        return PromptStep(list(blocks[: -(-end // self._size)]), keys, computed, load, store)

    def _is_stored(self, key: bytes) -> bool:
        """Whether all ranks' parts of a block have files."""
        return all(bytes(key) in store for store in self._stores)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        self._requests.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids)

    # A worker's.

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        with plain_defaults():
            caches = [kv_caches[name] for name in sorted(kv_caches, key=extract_layer_index)]
            self._blocks = _blocks(self._vllm_config, caches, sorted(kv_caches, key=extract_layer_index), self._codes)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if not self._metadata.prompts:
            return
        assert self._blocks is not None and self._writer is not None
        into, indices, found = [], [], []
        for prompt in self._metadata.prompts:
            for index in prompt.load:
                block = self._store.load(prompt.keys[index], self._blocks.nbytes(index))
                if block is None:  # vLLM computes from here on
                    lost = prompt.blocks[index : prompt.load.stop]
                    self._failed.update(lost)
                    self._validity.fail(lost)
                    break
                into.append(prompt.blocks[index])
                indices.append(index)
                found.append(block)
            if prompt.load:
                self._writer.put(prompt.keys[: prompt.load.stop], {})
        if found:
            self._blocks.write(into, indices, found)

    def wait_for_save(self) -> None:
        if not self._metadata.prompts:
            return
        assert self._blocks is not None and self._writer is not None
        chosen: dict[bytes, tuple[int, int]] = {}
        prefixes = []
        for prompt in self._metadata.prompts:
            before = -(-prompt.computed // self._size)
            right = self._validity.computed(prompt.blocks[:before], prompt.blocks[prompt.computed // self._size :])
            new = [index for index in prompt.store if right and self._writer.wants(prompt.keys[index])]
            chosen |= {prompt.keys[index]: (prompt.blocks[index], index) for index in new}
            prefixes += [prompt.keys] if new else []
        if chosen:
            blocks, indices = zip(*chosen.values(), strict=True)
            stored = dict(zip(chosen, self._blocks.read(blocks, indices), strict=True))
            for keys in prefixes:
                self._writer.put(keys, {key: stored.pop(key) for key in keys if key in stored})

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All layers were loaded before the step."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """All layers are stored after the step."""

    def shutdown(self) -> None:
        """Write what waits."""
        if self._writer is not None:
            self._writer.close()
            atexit.unregister(self._writer.close)

    @property
    def _metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata


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
    """One for each rank. They must not depend on the process that computes them."""
    model, cache, ranks = config.model_config, config.cache_config, config.parallel_config.tensor_parallel_size
    others = {
        "model": model_identity(model.model, model.revision),
        "config": [model.hf_config_path, model.hf_overrides],
        "quantization": model.quantization,
        "codes": None if codes is None else codes.digest,
        "cache": None,
    }
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
    """The blocks of this rank's caches, layer by layer. names: vLLM's, of the layers."""
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

"""What all layers of a vLLM engine share: the method, its plans, the page layout, the rotations."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, tensor_model_parallel_all_gather
from vllm.model_executor.models.utils import extract_layer_index

from kvq_cli.attention.rotary import Rotation, shared
from kvq_cli.codecs.layout import dtype_name
from kvq_cli.errors import KvqError
from kvq_cli.methods.base import ModelShape
from kvq_cli.models import layer_windows
from kvq_cli.vllm import rope
from kvq_cli.vllm.checks import check_flags, check_model, check_plans
from kvq_cli.vllm.drafts import check_drafts
from kvq_cli.vllm.layout import CacheLayout, cache_layout
from kvq_cli.vllm.local_layers import served_shape
from kvq_cli.vllm.paged_layer import PagedLayer
from kvq_cli.vllm.prefix_store.settings import CONNECTOR
from kvq_cli.vllm.prepare import check_weights
from kvq_cli.vllm.served import ServedMethod
from kvq_cli.vllm.shard import Shard


class Engine:
    """One engine's cache, of the heads of this process's rank. vLLM gives a backend no place to keep it: `current` is
    the newest of this process."""

    current: ClassVar[Engine | None] = None

    def __init__(self, config: VllmConfig, query_heads: int, kv_heads: int, head_dim: int) -> None:
        model = config.model_config
        _check_engine(config)
        check_model(model.hf_config, model.model)
        self.config = config
        text = model.hf_text_config
        layers, heads = text.num_hidden_layers, (text.num_attention_heads, model.get_total_num_kv_heads())
        served = ServedMethod.of_flags(config.cache_config.cache_dtype, config.additional_config)
        whole = ModelShape(
            layers, *heads, head_dim, text.hidden_size, dtype_name(model.dtype), windows=layer_windows(text)
        )
        whole = served_shape(served.method, whole)
        ranks = config.parallel_config.tensor_parallel_size
        shard = Shard(get_tensor_model_parallel_rank(), ranks, partial(tensor_model_parallel_all_gather, dim=1))
        self.shape = shard.shape(whole)
        if (self.shape.query_heads, self.shape.kv_heads) != (query_heads, kv_heads):
            raise KvqError(
                f"vLLM gives a rank {query_heads} query heads and {kv_heads} kv heads, not "
                f"{self.shape.query_heads} and {self.shape.kv_heads}: serve this model with --tensor-parallel-size 1"
            )
        if served.artifact is not None:
            served.artifact.check_config(model.hf_config, model.model)
            if shard.rank == 0:  # one rank reads the weights of all heads
                with plain_defaults(), torch.device("cpu"):
                    trusted, revision = model.trust_remote_code, model.revision
                    check_weights(served.artifact, model.hf_config, model.model, model.model, trusted, revision)
        device = torch.empty(0).device  # vLLM makes models on theirs
        with plain_defaults(), torch.device("cpu"):
            plans = served.plans_of_ranks(whole, ranks)
            check_plans(served.method, plans)
            self.rotations = [rope.unrotated(head_dim)] * len(whole.cached_layers)
            if any(plan.keys.source == "pre_rope" for plan in plans):
                found = rope.layer_rotations(model.hf_config, head_dim)
                self.rotations = shared(moved(found[layer], device) for layer in whole.cached_layers)
                rope.check_tables(self.rotations, model.max_model_len)
            # Kept: vLLM writes the size of its smallest blocks, those of exact tokens, into its configuration.
            layout = cache_layout(plans, self.shape, config.cache_config.block_size)
            self.layout: CacheLayout = layout.of_rank(shard.rank, len(whole.cached_layers))
            if self.layout.local is not None:
                config.cache_config.skip_page_size_padded = self.layout.page_bytes
        with plain_defaults():
            self.plans = plans if device.type == "cpu" and ranks == 1 else served.plans(whole, device, shard)
        self._layers, self._kernels, self.unusual_scores = 0, None, False
        if device.type == "cuda":
            from kvq_cli.vllm.paged_decode import PagedKernels  # imports Triton

            self._kernels = PagedKernels(model.max_model_len)

    @classmethod
    def for_config(cls, config: VllmConfig, query_heads: int, kv_heads: int, head_dim: int) -> Engine:
        """The engine of this configuration: a new one when the first layer is made."""
        if cls.current is None or cls.current.config is not config:
            cls.current = cls(config, query_heads, kv_heads, head_dim)
        return cls.current

    @property
    def has_exact_tokens(self) -> bool:
        """Whether any token is kept in full precision."""
        windows = [stream.window for plan in self.plans for stream in plan.kept]
        return any(window.sinks or window.recent or window.flush > 1 for window in windows)

    @cached_property
    def capturable(self) -> bool:
        """Whether CUDA graphs can hold the attention of all layers; after all of them have been made."""
        if self._kernels is None or self.unusual_scores:
            return False
        return all(self._layer(index).capturable for index in range(len(self.plans)))

    def next_layer(self) -> int:
        """Return the number of the layer that is being made, among `shape.cached_layers`: vLLM makes them in order.
        Raises KvqError for one beyond these."""
        if self._layers == len(self.shape.cached_layers):
            raise KvqError(
                f"vLLM made a layer beside the {self._layers} that kvq's pages are for: serve this model with "
                "--tensor-parallel-size 1"
            )
        self._layers += 1
        return self._layers - 1

    def paged_layer(self, index: int, name: str) -> PagedLayer:
        """Return the layer `index` of `shape.cached_layers`, which vLLM calls `name`."""
        if extract_layer_index(name) != self.shape.cached_layers[index]:
            raise KvqError(
                f"vLLM made the layer {name} as number {index}: serve this model with --tensor-parallel-size 1"
            )
        return self._layer(index)

    def _layer(self, index: int) -> PagedLayer:
        return PagedLayer(index, self.plans[index], self.shape, self.layout, self.rotations[index], self._kernels)


def _check_engine(config: VllmConfig) -> None:
    """Raise UsageError for vLLM's flags that kvq does not support."""
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    given = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "--decode-context-parallel-size": parallel.decode_context_parallel_size > 1,
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
        "--kv-transfer-config": transfer is not None and transfer.kv_connector != CONNECTOR,
        "--enable-sleep-mode": config.model_config.enable_sleep_mode,
        "--disable-hybrid-kv-cache-manager": bool(config.scheduler_config.disable_hybrid_kv_cache_manager),
    }
    check_flags([flag for flag, is_given in given.items() if is_given])
    if config.speculative_config is not None:
        check_drafts(config.speculative_config.method, stores=transfer is not None)


def moved(rotation: Rotation, device: torch.device) -> Rotation:
    """The rotation with its frequencies on `device`."""
    return dataclasses.replace(rotation, frequencies=rotation.frequencies.to(device))


@contextmanager
def plain_defaults() -> Iterator[None]:
    """While vLLM makes a model, new tensors have its dtype: codecs compute their tables in float32."""
    dtype: Any = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)

"""The attention backend: vLLM's interfaces over `PagedLayer`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, KVQuantMode

from kvq_cli.attention.score_form import ScoreForm
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import ModelShape
from kvq_cli.vllm.engine import Engine
from kvq_cli.vllm.exact_blocks import ExactSpec
from kvq_cli.vllm.layout import ExactWindow
from kvq_cli.vllm.local_layers import LOCAL_FLAGS
from kvq_cli.vllm.metadata import KvqMetadata
from kvq_cli.vllm.paged_layer import PagedLayer
from kvq_cli.vllm.served import cache_dtypes


class KvqBuilder(AttentionMetadataBuilder[KvqMetadata]):
    def __init__(
        self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # vLLM makes builders before it allocates a cache: the memory of one that it threw away must be free by then.
        for name in layer_names:
            impl = getattr(vllm_config.compilation_config.static_forward_context.get(name), "impl", None)
            if isinstance(impl, KvqImpl):
                impl.release()
        #: Most queries of a request that decodes.
        self._queries = 1 + vllm_config.num_speculative_tokens
        self._guessed = self._queries > 1 and bool(vllm_config.scheduler_config.async_scheduling)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec) -> AttentionCGSupport:
        """Let CUDA graphs hold the attention of steps in which every request has one query, or one and as many
        drafted tokens as are drafted at most, where no layer and codec needs the host."""
        engine = Engine.current
        if engine is None or not engine.capturable:
            return AttentionCGSupport.NEVER
        if vllm_config.num_speculative_tokens:
            return AttentionCGSupport.UNIFORM_BATCH
        return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> KvqMetadata:
        m = common_attn_metadata
        # Upper bounds on the lengths. Where vLLM schedules a step before it knows which drafted tokens the last one
        # rejected, only the device has the lengths.
        bounds = m.seq_lens_cpu_upper_bound
        exact = bounds is not None and len(bounds) == len(m.seq_lens) and not self._guessed
        known = bounds.tolist() if exact else None
        graphs = self.vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs()
        lengths = m.seq_lens, m.block_table_tensor
        count = m.max_query_len
        alike = count == 1 or (count <= self._queries and int(m.query_start_loc_cpu[-1]) == count * len(m.seq_lens))
        return KvqMetadata(m.query_start_loc_cpu, *lengths, count if alike else 0, known, graphs, self._queries)


class KvqBackend(AttentionBackend):
    """Attention over pages of packed tokens."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"  # the name of backends that plugins add

    @staticmethod
    def get_impl_cls() -> type[KvqImpl]:
        return KvqImpl

    @staticmethod
    def get_builder_cls() -> type[KvqBuilder]:
        return KvqBuilder

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        return kv_cache_dtype in cache_dtypes()

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """One state of `page_bytes` bytes for a block; nothing is known of heads and tokens in it."""
        engine = Engine.current
        if engine is None or spec.kv_quant_mode == KVQuantMode.NONE or spec.state_content_bytes is not None:
            return spec
        layout = engine.layout
        spec = replace(spec, num_head_slots=1, block_size=layout.block_size, tokens_per_state=layout.block_size)
        return replace(spec, state_content_bytes=layout.page_bytes)


class ExactBackend(KvqBackend):
    """The blocks of exact tokens, which have no attention of their own."""

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        return spec


class ExactTokens(torch.nn.Module, AttentionLayerBase):
    """The exact tokens of one layer, as vLLM sees them: a second layer with a cache."""

    def __init__(self, engine: Engine, shape: ModelShape) -> None:
        super().__init__()
        self.engine, self.shape, self.kv_cache = engine, shape, torch.empty(0)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return ExactBackend

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        layout, exact = self.engine.layout, self.engine.layout.exact
        assert isinstance(exact, ExactWindow)
        return ExactSpec(
            block_size=exact.block_size,
            num_kv_heads=1,
            head_size=self.shape.head_dim,
            dtype=torch.uint8,
            kv_quant_mode=KVQuantMode.CUSTOM,
            num_head_slots=1,
            tokens_per_state=exact.block_size,
            state_content_bytes=layout.page_bytes,
            sliding_window=exact.recent + 1,
            sinks=exact.sinks,
            windows=exact.windows,
        )


class KvqImpl(AttentionImpl[KvqMetadata]):
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **others: Any,
    ) -> None:
        if alibi_slopes is not None or kv_sharing_target_layer_name is not None:
            raise UsageError("kvq serves attention without ALiBi and layers that share a cache: serve another model")
        if sliding_window is not None:
            raise UsageError(f"layers with a sliding window need vLLM's own attention: give {' '.join(LOCAL_FLAGS)}")
        if others.get("sinks") is not None:
            raise UsageError("kvq serves attention without sink logits: use `kvq generate`")
        self.scaling, self.form = float(scale), ScoreForm.of(logits_soft_cap or None, None)
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads or num_heads
        self.engine = Engine.for_config(get_current_vllm_config(), num_heads, self.num_kv_heads, head_size)
        self.index = self.engine.next_layer()
        self.engine.unusual_scores |= self.form.unusual is not None
        self.exact_name: str | None = None
        if self.engine.has_exact_tokens:
            context = get_current_vllm_config().compilation_config.static_forward_context
            self.exact_name = f"model.layers.{self.engine.shape.cached_layers[self.index]}.self_attn.kvq_exact"
            self.exact = context[self.exact_name] = ExactTokens(self.engine, self.engine.shape)
        self.layer: PagedLayer | None = None
        #: The caches whose pages `layer` reads and writes: packed tokens, exact tokens.
        self.bound: tuple[Tensor | None, Tensor | None] = (None, None)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Keep the pages of local layers as large as kvq's, which the engine has said: vLLM would compute them anew
        where it skips layers, from what the attention of its first layer stores."""
        if self.engine.layout.local is not None:
            self.engine.config.cache_config.kv_cache_dtype_skip_layers = []

    def bind(self, name: str, kv_cache: Tensor) -> PagedLayer:
        """The layer, which vLLM calls `name`, over its cache `kv_cache`, those of all other layers, in which parts of
        its packed tokens may lie, and that of its exact tokens.

        vLLM measures CUDA graphs with a small cache before the real one exists, so a layer may be given another; it
        gives all layers theirs before a step. Making views is no work for the device: a step that is being captured
        may do it.
        """
        exact = None if self.exact_name is None else self.exact.kv_cache
        if self.layer is None:
            self.layer = self.engine.paged_layer(self.index, name)
        if self.bound[0] is not kv_cache or self.bound[1] is not exact:
            self.layer.bind(self._pages_of_layers(), None if exact is None else _pages(exact))
            self.bound = kv_cache, exact
        return self.layer

    def release(self) -> None:
        """Keep no cache's memory."""
        kv_cache, exact = self.bound
        if self.layer is not None and kv_cache is not None:
            none = _pages(kv_cache[:0]).clone()
            self.layer.bind([none] * len(self.engine.plans), None if exact is None else _pages(exact[:0]).clone())
        self.bound = None, None

    def _pages_of_layers(self) -> list[Tensor]:
        """The pages of packed tokens of all layers, uint8 `[pages, bytes]` each."""
        layers = self.engine.config.compilation_config.static_forward_context.values()
        ours = [layer for layer in layers if isinstance(getattr(layer, "impl", None), KvqImpl)]
        return [_pages(layer.kv_cache) for layer in sorted(ours, key=lambda layer: layer.impl.index)]

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: KvqMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        if attn_metadata is None:  # vLLM measures its memory before there is a cache
            return output.zero_()
        paged, exact = self.bind(layer.layer_name, kv_cache), None
        if self.exact_name is not None:
            exact = get_forward_context().attn_metadata[self.exact_name].blocks
        if attn_metadata.alike and self.engine.capturable:
            count = len(attn_metadata.lengths) * attn_metadata.alike
            new = query[:count], key[:count], value[:count]
            output[:count] = paged.attend_each(*new, attn_metadata.step(exact), self.scaling)
            return output
        batch = attn_metadata.batch(exact)
        count = int(attn_metadata.starts[-1])
        new = query[:count], key[:count], value[:count]
        output[:count] = paged.attend(*new, batch, self.scaling, self.form)
        return output


def _pages(cache: Tensor) -> Tensor:
    """uint8 `[pages, bytes]`."""
    return cache.view(torch.uint8)[:, 0, 0]

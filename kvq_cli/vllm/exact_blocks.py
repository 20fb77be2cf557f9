"""vLLM's blocks of tokens in full precision: the first tokens of a sequence, and its newest.

A sliding window of vLLM whose first blocks are never freed. A prefix can be reused where the exact tokens that the
method would hold at its end are cached, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashList, KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager, resolve_block_hashes
from vllm.v1.kv_cache_interface import KVCacheSpec, SlidingWindowSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from kvq_cli.methods.window import Window

#: More than the tokens of any sequence.
_ALL = 1 << 30


@dataclass(frozen=True, kw_only=True)
class ExactSpec(SlidingWindowSpec):
    """sinks: first tokens that are kept. windows: (sinks, recent, flush) of all streams. sliding_window: one more than
    the newest tokens that are kept."""

    sinks: int
    windows: tuple[tuple[int, int, int], ...]

    @property
    def sink_blocks(self) -> int:
        """Blocks that hold the first tokens."""
        return -(-self.sinks // self.block_size)

    @property
    def num_retained_tokens(self) -> int:
        # The worker clears the table of blocks before the newest tokens, which would lose the first ones.
        return _ALL if self.sinks else super().num_retained_tokens

    def max_admission_blocks_per_request(self, max_in_flight_tokens: int, max_model_len: int) -> int:
        return super().max_admission_blocks_per_request(max_in_flight_tokens, max_model_len) + self.sink_blocks

    def needed(self, tokens: int) -> list[int]:
        """The blocks that a sequence of `tokens` tokens, a whole number of blocks, reads or packs later."""
        first = min(sinks + Window(sinks, recent, flush).packed(tokens) for sinks, recent, flush in self.windows)
        blocks, sinks = tokens // self.block_size, min(self.sinks, tokens)
        recent = range(first // self.block_size, blocks) if first < tokens else range(0)
        return sorted({*range(-(-sinks // self.block_size)), *recent})


class ExactManager(SlidingWindowManager):
    """Allocates, frees and reuses blocks of an `ExactSpec`."""

    kv_cache_spec: ExactSpec

    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: BlockHashList,
        max_length: int,
        kv_cache_group_ids: list[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        drop_eagle_block: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        assert isinstance(kv_cache_spec, ExactSpec)
        size, groups = kv_cache_spec.block_size, len(kv_cache_group_ids)
        hashes = resolve_block_hashes(
            block_hashes,
            block_pool.hash_block_size,
            size,
            supports_fine_grained_hash_lookup=cls.supports_fine_grained_hash_lookup,
            alignment_tokens=alignment_tokens,
        )
        for tokens in range(max_length // alignment_tokens * alignment_tokens, 0, -alignment_tokens):
            needed = kv_cache_spec.needed(tokens)
            cached = {i: block_pool.get_cached_block(hashes[i], kv_cache_group_ids) for i in needed}
            if all(blocks is not None for blocks in cached.values()):
                hit: tuple[list[KVCacheBlock], ...] = tuple(
                    [block_pool.null_block] * (tokens // size) for _ in range(groups)
                )
                for i, blocks in cached.items():
                    for computed, block in zip(hit, blocks or (), strict=True):
                        computed[i] = block
                return hit, tokens
        return tuple([] for _ in range(groups)), 0

    @classmethod
    def reachable_block_mask(cls, *args: Any, **kwargs: Any) -> list[bool] | None:
        return None  # every block may serve a prefix that ends near it

    def get_num_blocks_to_allocate(
        self, request_id: str, num_tokens: int, new_computed_blocks: Sequence[KVCacheBlock], *args: Any, **kwargs: Any
    ) -> int:
        count = super().get_num_blocks_to_allocate(request_id, num_tokens, new_computed_blocks, *args, **kwargs)
        total = kwargs["total_computed_tokens"] if "total_computed_tokens" in kwargs else args[0]
        skipped = self.get_num_skipped_tokens(total) // self.block_size
        # Cached first blocks are taken out of the free blocks, too.
        kept = new_computed_blocks[: min(self.kv_cache_spec.sink_blocks, skipped)]
        return count + self._get_num_evictable_blocks(kept)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        blocks = self.req_to_blocks[request_id]
        assert not blocks and not num_external_computed_tokens
        if self.enable_caching:
            self.block_pool.touch([block for block in new_computed_blocks if not block.is_null])
        blocks.extend(new_computed_blocks)
        self.num_cached_block[request_id] = len(blocks)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        skipped = self.get_num_skipped_tokens(processed_computed_tokens) // self.block_size
        self._remove_blocks_in_range(request_id, self.kv_cache_spec.sink_blocks, skipped)


# vLLM's scheduler reads the specs that workers send: in a process of its own it has imported nothing else of kvq.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(ExactSpec, ExactManager)

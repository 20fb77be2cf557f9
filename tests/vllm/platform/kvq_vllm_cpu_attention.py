"""Attention over vLLM's own cache in PyTorch, for layers that kvq leaves to vLLM: those with a sliding window.

Stands for the backends of GPUs: blocks are multiples of 16 tokens, `[blocks, heads, tokens, keys | values]`, at any
stride.
"""

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder, MultipleOf


class LocalBuilder(AttentionMetadataBuilder):
    """Layers take vLLM's own description of a step."""

    def __init__(self, *args):
        super().__init__(*args)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_attn_metadata


class LocalBackend(AttentionBackend):
    @staticmethod
    def get_name():
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls():
        return LocalImpl

    @staticmethod
    def get_builder_cls():
        return LocalBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(16)]


class LocalImpl(AttentionImpl):
    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi, window, dtype, softcap, *_args, **_options):
        assert alibi is None and window is not None and dtype == "auto"
        self.head_size, self.scale, self.window, self.softcap = head_size, scale, window, softcap

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):
        if attn_metadata is None:
            return output.zero_()
        step, size = attn_metadata, kv_cache.shape[2]
        cells = kv_cache.transpose(1, 2)  # [blocks, tokens of a block, heads, keys | values]
        slots = step.slot_mapping[: step.num_actual_tokens]
        kept = slots >= 0
        new = torch.cat([key, value], dim=-1)[: step.num_actual_tokens]
        cells[slots[kept] // size, slots[kept] % size] = new[kept]
        starts, lengths = step.query_start_loc.tolist(), step.seq_lens.tolist()
        for row, (start, stop) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
            if stop > start:
                length, count = lengths[row], stop - start
                tokens = torch.arange(max(0, length - count - self.window + 1), length)
                seen = cells[step.block_table_tensor[row][tokens // size].long(), tokens % size]
                output[start:stop] = self._attend(query[start:stop], seen, torch.arange(length - count, length), tokens)
        return output

    def _attend(self, query, cells, positions, tokens):
        """query: `[queries, heads, head_dim]` at `positions`. cells: `[tokens, kv_heads, keys | values]`."""
        group = query.shape[1] // cells.shape[1]
        keys, values = cells.repeat_interleave(group, dim=1).split(self.head_size, dim=-1)
        scores = torch.einsum("qhd,thd->hqt", query, keys).float() * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        distance = positions[:, None] - tokens
        scores.masked_fill_((distance < 0) | (distance >= self.window), float("-inf"))
        return torch.einsum("hqt,thd->qhd", scores.softmax(dim=-1).to(values.dtype), values)

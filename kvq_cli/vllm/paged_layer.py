"""One layer of a paged cache, and the attention of a batch of sequences over it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvq_cli.attention import torch_backend
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.rotary import Rotation
from kvq_cli.attention.score_form import ScoreForm
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.rows import Forward, RowGroup
from kvq_cli.methods.base import LayerPlan, ModelShape
from kvq_cli.vllm.layout import CacheLayout
from kvq_cli.vllm.pages import PagedStream
from kvq_cli.vllm.rope import unrotate


class Sequence(NamedTuple):
    """New tokens [start, stop) of a batch that belong to one sequence, which has `past` tokens before them.

    blocks, exact_blocks: the pages of the sequence, int64.
    """

    start: int
    stop: int
    past: int
    blocks: Tensor
    exact_blocks: Tensor | None


class PagedLayer(CompressedLayer):
    """A layer whose keys and values lie in pages; `attend` computes a step of vLLM."""

    def __init__(self, index: int, plan: LayerPlan, shape: ModelShape, layout: CacheLayout, rotation: Rotation) -> None:
        super().__init__(index, plan, rotation)
        page, size = layout.layers[index], layout.exact.block_size if layout.exact else 0
        keys = PagedStream(plan.keys, shape, page.keys, layout.block_size, size)
        values = PagedStream(plan.values, shape, page.values, layout.block_size, size)
        self.streams = keys, values
        self.key_stream, self.value_stream, self.summed = keys, values, (values, None)
        self.kv_heads, self._shape, self._exact_size = shape.kv_heads, shape, size

    def bind(self, pages: Tensor, exact_pages: Tensor | None) -> None:
        """Use these pages, uint8 `[pages, bytes]` each."""
        shape, exact = self._shape, None
        if exact_pages is not None:
            numbers = 2 * self._exact_size * shape.kv_heads * shape.head_dim
            exact = exact_pages[:, : numbers * shape.dtype.itemsize].view(shape.dtype)
            exact = exact.unflatten(1, (2, self._exact_size, shape.kv_heads, shape.head_dim))
        for side, stream in enumerate(self.paged):
            stream.bind(pages, None if exact is None else exact[:, side])

    @property
    def paged(self) -> tuple[PagedStream, ...]:
        """The streams."""
        return tuple(stream for stream in self.streams if isinstance(stream, PagedStream))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: list[Sequence], scaling: float, form: ScoreForm
    ) -> Tensor:
        """Append the new tokens of all sequences and compute their attention, every token as if it were decoded alone.

        query: `[tokens, query_heads, head_dim]`, key, value: `[tokens, kv_heads, head_dim]`, after RoPE. Returns
        `[tokens, query_heads, head_dim]`. The reference in PyTorch, a sequence at a time.
        """
        out = torch.empty_like(query)
        for sequence in sequences:
            rows = slice(sequence.start, sequence.stop)
            q, k, v = (x[rows].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            out[rows] = self._attend_one(q, k, v, sequence, scaling, form)[0].transpose(0, 1)
        return out

    def _attend_one(
        self, query: Tensor, key: Tensor, value: Tensor, sequence: Sequence, scaling: float, form: ScoreForm
    ) -> Tensor:
        past, columns = sequence.past, sequence.stop - sequence.start
        group = RowGroup(slice(0, 1), 0, past, past + columns, 0)
        forward = Forward(columns, past, (group,), (0,))
        for paged in self.paged:
            paged.open(past, sequence.blocks, sequence.exact_blocks)
        self._keep_tails(forward)
        cached = key
        if self.plan.keys.source == "pre_rope":
            cached = unrotate(self.rotation, key, past)
        for stream, x in zip(self.streams, (cached, value), strict=True):
            stream.append(x, forward.row_groups)
        context = ForwardContext(self, forward, torch_backend, True, scaling=scaling, score_form=form)
        if columns == 1:
            return torch_backend.decode_attention(query, context)
        return torch_backend.prefill_attention(query, key, value, context)

"""One layer of a paged cache, and the attention of a batch of sequences over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvq_cli.attention import torch_backend
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.rotary import Rotation
from kvq_cli.attention.score_form import ScoreForm
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.rows import Forward, RowSpan
from kvq_cli.codecs.base import Codec
from kvq_cli.methods.base import LayerPlan, ModelShape
from kvq_cli.vllm.batch import Batch, Rows, Sequence
from kvq_cli.vllm.layout import CacheLayout
from kvq_cli.vllm.pages import PagedStream, shifts
from kvq_cli.vllm.rope import unrotated_by
from kvq_cli.vllm.step import Step

if TYPE_CHECKING:
    from kvq_cli.vllm.paged_decode import PagedKernels


class PagedLayer(CompressedLayer):
    """A layer whose keys and values lie in pages; `attend` computes a step of vLLM.

    kernels: decode sequences with one new token, or one and drafted ones, where they can read the layer; None: the
    reference does.
    """

    def __init__(
        self,
        index: int,
        plan: LayerPlan,
        shape: ModelShape,
        layout: CacheLayout,
        rotation: Rotation,
        kernels: PagedKernels | None = None,
    ) -> None:
        super().__init__(index, plan, rotation)
        page, size = layout.layers[index], layout.exact.block_size if layout.exact else 0
        self.key_shift, self.value_shift = shifts(plan.keys, plan.values)
        keys = PagedStream(plan.keys, shape, page.keys, layout.block_size, size, self.key_shift)
        values = PagedStream(plan.values, shape, page.values, layout.block_size, size, self.value_shift)
        self.streams = keys, values
        self.key_stream, self.value_stream, self.summed = keys, values, (values, None)
        self.kv_heads, self._shape, self._exact_size = shape.kv_heads, shape, size
        self.kernels = None if kernels is None or kernels.why_not(self) else kernels
        if self.kernels is not None:
            self.kernels.prepare(self)

    def bind(self, pages: list[Tensor], exact_pages: Tensor | None) -> None:
        """Use these pages, uint8 `[pages, bytes]` each.

        pages: of packed tokens, those of all layers: parts of this one may lie in any of them. exact_pages: its own.
        """
        shape, exact = self._shape, None
        if exact_pages is not None:
            numbers = 2 * self._exact_size * shape.kv_heads * shape.head_dim
            exact = exact_pages[:, : numbers * shape.torch_dtype.itemsize].view(shape.torch_dtype)
            exact = exact.unflatten(1, (2, self._exact_size, shape.kv_heads, shape.head_dim))
        for side, stream in enumerate(self.paged):
            stream.bind(pages, None if exact is None else exact[:, side])

    @property
    def paged(self) -> tuple[PagedStream, ...]:
        """The streams."""
        return tuple(stream for stream in self.streams if isinstance(stream, PagedStream))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, batch: Batch, scaling: float, form: ScoreForm
    ) -> Tensor:
        """Append the new tokens of all sequences and compute their attention, every token as if it were decoded alone.

        query: `[tokens, query_heads, head_dim]`, key, value: `[tokens, kv_heads, head_dim]`, after RoPE. Returns
        `[tokens, query_heads, head_dim]`. Sequences that decode go together to the kernels. Those with more new
        tokens, and all without kernels, are computed by the reference in PyTorch, one after another.
        """
        out = torch.empty_like(query)
        kernels = None if form.unusual else self.kernels
        for each in batch.writers_first if kernels is None else batch.together:
            if isinstance(each, Rows):
                self._append_each(key[each.places], value[each.places], each.step)
                continue
            rows = slice(each.start, each.stop)
            q, k, v = (x[rows].transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            context = self._append(k, v, each, scaling, form)
            out[rows] = _reference(q, k, v, context)[0].transpose(0, 1)
        if kernels is not None and batch.decoded is not None:
            places, step = batch.decoded.places, batch.decoded.step
            out[places] = kernels.attend(query[places], self, step, scaling)
        return out

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph can hold `attend_each`."""
        codecs = [stream.plan.codec for stream in self.paged]
        return self.kernels is not None and all(isinstance(each, Codec) and each.capturable for each in codecs)

    def attend_each(self, query: Tensor, key: Tensor, value: Tensor, step: Step, scaling: float) -> Tensor:
        """`attend` of a step, one token in each row, `[rows, heads, head_dim]`, where `capturable`: nothing is
        read back, so that a CUDA graph can hold it, and replay it when the tensors of `step` have changed."""
        if self.kernels is None:
            raise ValueError("only kernels decode the sequences of a step together")
        step.enter(self.index)
        self._append_each(key, value, step)
        return self.kernels.attend(query, self, step, scaling)

    def _append_each(self, key: Tensor, value: Tensor, step: Step) -> None:
        """Store a new token of each row, `[rows, kv_heads, head_dim]`."""
        cached = key
        if self.plan.keys.source == "pre_rope":
            cached = unrotated_by(step.inverse_tables(self.rotation), self.rotation, key)
        for stream, x in zip(self.paged, (cached, value), strict=True):
            stream.append_each(x, step)

    def _append(
        self, key: Tensor, value: Tensor, sequence: Sequence, scaling: float, form: ScoreForm
    ) -> ForwardContext:
        """Store a sequence's new tokens, `[1, kv_heads, tokens, head_dim]`; returns the context of their attention."""
        past, columns = sequence.past, sequence.stop - sequence.start
        span = RowSpan(slice(0, 1), 0, past, past + columns, 0)
        forward = Forward(columns, past, (span,), (0,))
        for paged in self.paged:
            paged.open(past, sequence.table, sequence.exact_table)
        self._keep_tails(forward)
        cached = key
        if self.plan.keys.source == "pre_rope":
            cached = unrotated_by(sequence.inverse_tables(self.rotation), self.rotation, key)
        for stream, x in zip(self.streams, (cached, value), strict=True):
            stream.append(x, forward.row_spans)
        return ForwardContext(self, forward, torch_backend, True, scaling=scaling, score_form=form)


def _reference(query: Tensor, key: Tensor, value: Tensor, context: ForwardContext) -> Tensor:
    if query.shape[2] == 1:
        return torch_backend.decode_attention(query, context)
    return torch_backend.prefill_attention(query, key, value, context)

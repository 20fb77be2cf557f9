"""Decode attention of a paged layer by the kernels of kvq_kernels, for all sequences of a step in one launch.

Importing this imports Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvq_kernels.decode_attention import Pages, Side
from kvq_kernels.decode_attention import decode_attention as attend
from torch import Tensor

from kvq_cli.attention.kernel_sides import side_of, unsupported
from kvq_cli.attention.kernel_tables import KernelTables
from kvq_cli.vllm.pages import PagedStream

if TYPE_CHECKING:
    from kvq_cli.vllm.paged_layer import PagedLayer, Step


class PagedKernels:
    """The kernels' side of an engine, shared by its layers. max_tokens: of a sequence."""

    def __init__(self, max_tokens: int) -> None:
        self._tables, self._max_tokens = KernelTables(), max_tokens

    @staticmethod
    def why_not(layer: PagedLayer) -> str | None:
        """Why the kernels cannot read a layer; None: they can."""
        if layer.key_shift != layer.value_shift:
            return "packed keys and values begin at different places of their pages"
        return unsupported(layer.plan, layer.rotation)

    def attend(self, query: Tensor, layer: PagedLayer, step: Step, scaling: float) -> Tensor:
        """softmax(q K^T) V over what the layer holds of the sequences, the newest token included.

        query: `[rows, query_heads, head_dim]`, one per sequence of `step`.
        """
        keys, values = (self._side(stream, step) for stream in layer.paged)
        rope = None
        if layer.plan.keys.source == "pre_rope" and layer.rotation.style != "none":
            rope = self._tables.rope(layer.rotation, self._max_tokens - 1, query.device)
        # No workspace is kept: there would be one for each batch size, up to GiB together. torch's caching allocator
        # gives all layers the same memory; while a CUDA graph is captured, that of the graph's pool.
        return attend(query, keys, values, step.lengths, scaling, rope=rope, backend="triton")

    def _side(self, stream: PagedStream, step: Step) -> Side:
        count = stream.packed_of(step.lengths)
        sinks = ring = None
        if step.exact_blocks is not None:
            sinks, ring = stream.exact_of(step.lengths, step.exact_blocks)
        pages = Pages(step.blocks, stream.block_size, first=stream.shift)
        return side_of(stream.codec, stream.parts, count, sinks, ring, pages=pages)

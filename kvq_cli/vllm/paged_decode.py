"""Decode attention of a paged layer by the kernels of kvq_kernels, for all sequences of a step in one launch.

Importing this imports Triton.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvq_kernels.decode_attention import Pages, Side
from kvq_kernels.decode_attention import decode_attention as attend
from kvq_kernels.transform_attention import transform_attention as attend_components
from torch import Tensor

from kvq_cli.attention import transform_backend
from kvq_cli.attention.kernel_sides import side_of, unsupported
from kvq_cli.attention.kernel_tables import KernelTables
from kvq_cli.attention.rotated_channels import attend_rotated
from kvq_cli.attention.transform_backend import stores_components
from kvq_cli.codecs.base import KeyRotation
from kvq_cli.vllm.pages import PagedStream

if TYPE_CHECKING:
    from kvq_cli.vllm.paged_layer import PagedLayer
    from kvq_cli.vllm.step import Step


class PagedKernels:
    """The kernels' side of an engine, shared by its layers. max_tokens: of a sequence."""

    def __init__(self, max_tokens: int) -> None:
        self._tables, self._max_tokens = KernelTables(), max_tokens

    @staticmethod
    def why_not(layer: PagedLayer) -> str | None:
        """Why the kernels do not read a layer; None: they do."""
        if layer.key_shift != layer.value_shift:
            return "packed keys and values begin at different places of their pages"
        if stores_components(layer.plan):  # unfused, each step would unpack room for the longest sequence in every row
            why = transform_backend.unsupported(layer.plan, layer.rotation)
            return why or transform_backend.unfused(layer.plan, layer.paged[0].ring.dtype)
        return unsupported(layer.plan, layer.rotation)

    @staticmethod
    def prepare(layer: PagedLayer) -> None:
        """Make what kernels of a layer take beside its pages."""
        transform_backend.prepare(layer.plan, layer.rotation)

    def attend(self, query: Tensor, layer: PagedLayer, step: Step, scaling: float) -> Tensor:
        """softmax(q K^T) V over what the layer holds of the sequences, the newest token included.

        query: `[rows, query_heads, head_dim]`, one per sequence of `step`.
        """
        keys, values = map(_side, layer.paged, (layer.rotation.of_keys, None), (step, step))
        rope = None
        if layer.plan.keys.source == "pre_rope" and layer.rotation.style != "none":
            rope = self._tables.rope(layer.rotation, self._max_tokens - 1, query.device)
        # No workspace is kept: there would be one for each batch size, up to GiB together. torch's caching allocator
        # gives all layers the same memory; while a CUDA graph is captured, that of the graph's pool.
        compute = attend_components if stores_components(layer.plan) else attend

        def launch(q: Tensor, k: Side, v: Side) -> Tensor:
            return compute(q, k, v, step.lengths, scaling, rope=rope, backend="triton")

        return attend_rotated(launch, query, keys, values, (layer.plan.keys.codec, layer.plan.values.codec))


def _side(stream: PagedStream, rotation: KeyRotation, step: Step) -> Side:
    count = step.packed(stream.window)
    sinks, ring = (None, None) if step.exact_blocks is None else stream.exact_of(step)
    pages = Pages(step.blocks, stream.block_size, first=stream.shift)
    return side_of(stream.codec, stream.parts, count, sinks, ring, pages=pages, rotation=rotation)

"""Short passes, of 2 to 16 tokens behind a cache, as the kernel of decode steps computes them: all queries must see the
same tokens packed. Which ones these are is known on the host.

The cache packs before attention reads it. Where queries see the tokens of the pass in full precision (prefill="exact"),
they see packed what was packed before the pass; if it packed more, the kernel reads a copy of all unpacked tokens as
the ring buffer. Where queries see what they would see decoded one by one (prefill="compressed"), the kernel reads the
cache itself if all of them see the same packed tokens; PyTorch computes the pass otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.cache.rows import SHORT_COLUMNS, Forward
from kvq_cli.cache.stream import StreamReader
from kvq_cli.methods.window import Window


def by_kernel(context: ForwardContext) -> bool:
    """Whether the kernel can compute the attention of a pass."""
    layer, forward = context.layer, context.forward
    if not forward.is_short:
        return False
    streams = layer.key_stream, layer.value_stream
    return not context.compressed or not any(packs(stream.window, forward, 1) for stream in streams)


def packs(window: Window, forward: Forward, first: int = 0) -> bool:
    """Whether a pass packs tokens of any row; the flush of its first `first` tokens does not count."""
    return any(
        window.packed(span.tokens) != window.packed(span.past + first)
        for span in forward.row_spans
        if span.tokens > span.past
    )


def recent_before_packing(stream: StreamReader, new: Tensor, tails: list[Tensor | None], forward: Forward) -> Tensor:
    """A ring buffer `[rows, kv_heads, ring_size, head_dim]` of all tokens that were not packed before the pass, its own
    included. new: those of the pass, as the stream caches them, `[rows, kv_heads, columns, head_dim]`. tails: of each
    row span, those before them.
    """
    window = stream.window
    size = -(-(stream.ring.shape[2] + SHORT_COLUMNS) // 16) * 16  # a multiple of 16: kernels are compiled once
    rows, heads, _, dim = stream.ring.shape
    ring = stream.ring.new_empty(rows, heads, size, dim)
    for span, tail in zip(forward.row_spans, tails, strict=True):
        x = new[span.rows, :, span.pads + max(0, min(window.sinks, span.tokens) - span.past) :]
        x = x if tail is None else torch.cat([tail, x], dim=2)
        place = window.packed(span.past) % size
        before_end = min(size - place, x.shape[2])
        ring[span.rows, :, place : place + before_end] = x[:, :, :before_end]
        ring[span.rows, :, : x.shape[2] - before_end] = x[:, :, before_end:]
    return ring

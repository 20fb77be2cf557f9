"""Attention of one query per row, or a few, by the kernels of kvq_kernels, which read packed tensors directly.

`torch_backend` computes more queries per row, and passes that `short_passes` leaves to it. Importing this imports
Triton: `backend` does so only where needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from kvq_kernels.decode_attention import Rope, Side
from kvq_kernels.decode_attention import decode_attention as attend
from torch import Tensor
from triton import knobs

from kvq_cli.attention import short_passes, torch_backend
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.kernel_sides import norm_of, side, unsupported
from kvq_cli.attention.kernel_tables import KernelTables
from kvq_cli.attention.rotary import Rotation
from kvq_cli.attention.rotated_channels import attend_rotated
from kvq_cli.cache.modes import changes_stored_tensors
from kvq_cli.cache.rows import Forward, RowSpan
from kvq_cli.cache.stream import StreamReader
from kvq_cli.errors import UsageError
from kvq_cli.methods.window import Window

__all__ = ["TritonBackend", "interpreted", "unsupported"]

#: Numbers of dropped tokens for which rows are counted at a time: layers of a cache have few, which grow.
MAX_COUNTS = 8


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU's tensors too; decided when kvq_kernels is imported."""
    return knobs.runtime.interpret


class _Shared(threading.local):
    """Tensors that the layers of a pass share, at fixed device addresses. Each thread has its own."""

    def __init__(self) -> None:
        self.counts, self.tables = dict[int, _Counts](), KernelTables()


class TritonBackend:
    """The backend of all layers of an attached model; see `Backend`.

    Holds the tensors that layers share: tokens of each row, tables of cosines that grow with the longest text,
    workspaces.
    """

    def __init__(self) -> None:
        self._shared = _Shared()

    @property
    def _counts(self) -> dict[int, _Counts]:
        """Counts of tokens behind those that layers have dropped, by how many these are."""
        return self._shared.counts

    def _counts_behind(self, dropped: int) -> _Counts:
        counts = self._counts
        counts[dropped] = counts.pop(dropped) if dropped in counts else _Counts()  # the last one is the newest in use
        if len(counts) > MAX_COUNTS:
            del counts[next(iter(counts))]
        return counts[dropped]

    @property
    def _tables(self) -> KernelTables:
        return self._shared.tables

    def decode_attention(self, query: Tensor, context: ForwardContext) -> Tensor:
        """softmax(q K^T) V for one query per row, `[batch, query_heads, 1, head_dim]`; zeros for pads.

        Not used for layers with soft-capping or attention sinks.
        """
        layer, forward = context.layer, context.forward
        keys, values = layer.key_stream, layer.value_stream
        if not keys.ring.shape[3] == values.ring.shape[3] == query.shape[3]:
            raise UsageError(f"layer {layer.index}: keys and values of different head_dim need --backend torch")
        key_side, value_side = (
            side(stream, self.packed_lengths(forward, stream.window, query.device)) for stream in (keys, values)
        )
        return self._attend(query[:, :, 0], key_side, value_side, context).unsqueeze(2)

    def prefill_attention(self, query: Tensor, key: Tensor, value: Tensor, context: ForwardContext) -> Tensor:
        """Causal attention of several queries per row; see `Backend`. By one launch of the kernel where
        `short_passes.by_kernel`, else by PyTorch."""
        layer = context.layer
        keys, values = layer.key_stream, layer.value_stream
        same_dim = keys.ring.shape[3] == values.ring.shape[3] == query.shape[3]
        if query.requires_grad or not same_dim or not short_passes.by_kernel(context):
            return torch_backend.prefill_attention(query, key, value, context)
        key_side, value_side = (self._side_of_pass(i, stream, context) for i, stream in enumerate((keys, values)))
        return self._attend(query, key_side, value_side, context)

    def _side_of_pass(self, number: int, stream: StreamReader, context: ForwardContext) -> Side:
        """Keys (0) or values (1) as the queries of a short pass see them."""
        forward, window, device = context.forward, stream.window, stream.ring.device
        if context.compressed or not short_passes.packs(window, forward):
            return side(stream, self.packed_lengths(forward, window, device))
        tails = [tail[number] for tail in context.layer.tails]
        ring = short_passes.recent_before_packing(stream, context.layer.arrived[number], tails, forward)
        return replace(side(stream, self._followed(forward, device).packed_before(window)), ring=ring)

    def _attend(self, query: Tensor, keys: Side, values: Side, context: ForwardContext) -> Tensor:
        """softmax(q K^T) V by one launch. query: `[rows, query_heads, head_dim]`, or of several queries
        `[rows, query_heads, queries, head_dim]`; the result has its shape."""
        layer, forward = context.layer, context.forward
        lengths, rope = self.lengths(forward, query.device), None
        if layer.plan.keys.source == "pre_rope" and layer.rotation.style != "none":
            rope = self.rope(layer.rotation, forward, query.device)
        norm = norm_of(layer.key_stream)
        if norm is not None:  # q . (norm k') = (q norm) . k'
            norm = norm.unsqueeze(2) if query.ndim == 3 else norm[:, :, None, None]
            query = (query.unflatten(1, (norm.shape[1], -1)) * norm).flatten(1, 2).to(query.dtype)

        def launch(q: Tensor, k: Side, v: Side) -> Tensor:
            # Workspaces are kept for captured steps, which are of one query.
            workspace = self._tables.workspace(q, k, v, rope) if q.ndim == 3 else None
            return attend(
                q,
                k,
                v,
                lengths,
                context.scaling,
                rope=rope,
                window=layer.sliding_window,
                workspace=workspace,
                backend="triton",
            )

        return attend_rotated(launch, query, keys, values, (layer.plan.keys.codec, layer.plan.values.codec))

    def can_capture(self, tokens: int, offsets: list[int], dropped: list[int]) -> bool:
        """Whether the next step of rows of `tokens` tokens each can be captured: all its tensors are on the device and
        hold the numbers of these rows. offsets: see `RowSpan`. dropped: see `CompressedCache.dropped`."""
        known = all(
            self._counts_behind(number).known(tokens - number, [offset + number for offset in offsets])
            for number in dropped
        )
        return known and self._tables.have(tokens + max(offsets))

    def tensors(self) -> list[Tensor]:
        """All tensors of the backend that a decode step reads or writes."""
        counts = [tensor for _, counts in sorted(self._counts.items()) for tensor in counts.tensors()]
        return [*counts, *self._tables.tensors()]

    def advance(self, forward: Forward, dropped: list[int]) -> None:
        """Count a replayed step, of layers that dropped so many tokens."""
        for number in dropped:
            self._counts_behind(number).advance(forward.behind(number))

    def forget(self) -> None:
        """Invalidate the counts, which may differ from the device's: the next step sends them again."""
        for counts in self._counts.values():
            counts.forget()

    def lengths(self, forward: Forward, device: torch.device) -> Tensor:
        """int32 `[rows]`: tokens of each row."""
        return self._followed(forward, device).tokens

    def packed_lengths(self, forward: Forward, window: Window, device: torch.device) -> Tensor:
        """int32 `[rows]`: tokens of each row that `window` packs."""
        return self._followed(forward, device).packed(window)

    def rope(self, rotation: Rotation, forward: Forward, device: torch.device) -> Rope:
        """The rotation's tables of cosines, long enough for all rows, with the position of each row's first token."""
        rope = self._tables.rope(rotation, max(span.last_position for span in forward.row_spans), device)
        if not any(span.offset for span in forward.row_spans):
            return rope
        return replace(rope, offset=self._followed(forward, device).offsets)

    def _followed(self, forward: Forward, device: torch.device) -> _Counts:
        counts = self._counts_behind(forward.dropped)
        counts.follow(forward, device)
        return counts


class _Counts:
    """Tokens of each row, on the device. A step that adds one token to every row increments them there."""

    def __init__(self) -> None:
        self._forward: Forward | None = None
        self._known: tuple[list[int], list[int]] = ([], [])
        self.tokens = self.offsets = torch.empty(0, dtype=torch.int32)
        self._packed: dict[Window, Tensor] = {}
        self._packed_before: dict[Window, Tensor] = {}
        self._current: set[Window] = set()

    @changes_stored_tensors
    def follow(self, forward: Forward, device: torch.device) -> None:
        """Count the tokens that a pass has brought."""
        if forward is self._forward:
            return
        tokens = _per_row(forward, lambda span: span.tokens)
        offsets = _per_row(forward, lambda span: span.offset)
        if self.tokens.device == device and self._known == ([n - 1 for n in tokens], offsets):
            self.tokens += 1
        else:
            self.tokens, self.offsets = (
                _sent(numbers, tensor, device) for numbers, tensor in ((tokens, self.tokens), (offsets, self.offsets))
            )
        self._forward, self._known = forward, (tokens, offsets)
        self._current.clear()
        self._packed_before.clear()

    def known(self, tokens: int, offsets: list[int]) -> bool:
        """Whether the last step was followed and left rows of these offsets with `tokens` tokens each: it may have been
        a step of another cache."""
        return self._known == ([tokens] * len(offsets), offsets)

    def tensors(self) -> list[Tensor]:
        """All counts."""
        return [self.tokens, self.offsets, *self._packed.values()]

    def advance(self, forward: Forward) -> None:
        """Do the part of `follow` that is on the host."""
        self._forward = forward
        self._known = [tokens + 1 for tokens in self._known[0]], self._known[1]

    def forget(self) -> None:
        """See `TritonBackend.forget`."""
        self._forward, self._known = None, ([], [])

    def packed_before(self, window: Window) -> Tensor:
        """`window.packed` of the rows' tokens before the pass that was followed last, int32 `[rows]`."""
        if window not in self._packed_before:
            assert self._forward is not None
            counts = _per_row(self._forward, lambda span: window.packed(span.past))
            self._packed_before[window] = torch.tensor(counts, dtype=torch.int32).to(self.tokens.device)
        return self._packed_before[window]

    @changes_stored_tensors
    def packed(self, window: Window) -> Tensor:
        """`window.packed` of the rows' tokens, int32 `[rows]`."""
        count = self._packed.get(window)
        if count is None or count.shape != self.tokens.shape or count.device != self.tokens.device:
            count = self._packed[window] = torch.empty_like(self.tokens)
            self._current.discard(window)
        if window not in self._current:
            torch.sub(self.tokens, window.sinks + window.recent, out=count).clamp_(min=0)
            count.div_(window.flush, rounding_mode="floor").mul_(window.flush)
            self._current.add(window)
        return count


def _sent(numbers: list[int], tensor: Tensor, device: torch.device) -> Tensor:
    """The numbers on the device; in `tensor` itself where it has their shape."""
    counts = torch.tensor(numbers, dtype=torch.int32)
    fits = tensor.shape == counts.shape and tensor.device == device
    return tensor.copy_(counts) if fits else counts.to(device)


def _per_row(forward: Forward, number: Callable[[RowSpan], int]) -> list[int]:
    """A number of each row of the batch, the same for all rows of a span."""
    return [number(span) for span in forward.row_spans for _ in range(span.rows.start, span.rows.stop)]

"""Attention of one query per row by the kernels of kvq_kernels, which read packed tensors directly.

`torch_backend` computes several queries per row. Importing this imports Triton: `backend` does so only where needed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import torch
from kvq_kernels.decode_attention import Rope
from kvq_kernels.decode_attention import decode_attention as attend
from torch import Tensor
from triton import knobs

from kvq_cli.attention import torch_backend
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.kernel_sides import norm_of, side, unsupported
from kvq_cli.attention.kernel_tables import KernelTables
from kvq_cli.attention.rotary import Rotation
from kvq_cli.cache.modes import changes_stored_tensors
from kvq_cli.cache.rows import Forward, RowSpan
from kvq_cli.errors import UsageError
from kvq_cli.methods.window import Window

__all__ = ["TritonBackend", "interpreted", "unsupported"]


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, on a CPU's tensors too; decided when kvq_kernels is imported."""
    return knobs.runtime.interpret


class _Shared(threading.local):
    """Tensors that the layers of a pass share, at fixed device addresses. Each thread has its own."""

    def __init__(self) -> None:
        self.counts, self.tables = _Counts(), KernelTables()


class TritonBackend:
    """The backend of all layers of an attached model; see `Backend`.

    Holds the tensors that layers share: tokens of each row, tables of cosines that grow with the longest text,
    workspaces.
    """

    prefill_attention = staticmethod(torch_backend.prefill_attention)

    def __init__(self) -> None:
        self._shared = _Shared()

    @property
    def _counts(self) -> _Counts:
        return self._shared.counts

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
        lengths = self.lengths(forward, query.device)
        key_side, value_side = (
            side(stream, self.packed_lengths(forward, stream.window, query.device)) for stream in (keys, values)
        )
        rope = None
        if layer.plan.keys.source == "pre_rope" and layer.rotation.style != "none":
            rope = self.rope(layer.rotation, forward, query.device)
        q, norm = query[:, :, 0], norm_of(keys)
        if norm is not None:  # q . (norm k') = (q norm) . k'
            q = (q.unflatten(1, (norm.shape[1], -1)) * norm.unsqueeze(2)).flatten(1, 2).to(query.dtype)
        workspace = self._tables.workspace(q, key_side, value_side, rope)
        return attend(
            q,
            key_side,
            value_side,
            lengths,
            context.scaling,
            rope=rope,
            window=layer.sliding_window,
            workspace=workspace,
            backend="triton",
        ).unsqueeze(2)

    def can_capture(self, tokens: int, offsets: list[int]) -> bool:
        """Whether the next step of rows of `tokens` tokens each can be captured: all its tensors are on the device and
        hold the numbers of these rows. offsets: see `RowSpan`."""
        return self._counts.known(tokens, offsets) and self._tables.have(tokens + max(offsets))

    def tensors(self) -> list[Tensor]:
        """All tensors of the backend that a decode step reads or writes."""
        return [*self._counts.tensors(), *self._tables.tensors()]

    def advance(self, forward: Forward) -> None:
        """Count a replayed step."""
        self._counts.advance(forward)

    def forget(self) -> None:
        """Invalidate the counts, which may differ from the device's: the next step sends them again."""
        self._counts.forget()

    def lengths(self, forward: Forward, device: torch.device) -> Tensor:
        """int32 `[rows]`: tokens of each row."""
        self._counts.follow(forward, device)
        return self._counts.tokens

    def packed_lengths(self, forward: Forward, window: Window, device: torch.device) -> Tensor:
        """int32 `[rows]`: tokens of each row that `window` packs."""
        self._counts.follow(forward, device)
        return self._counts.packed(window)

    def rope(self, rotation: Rotation, forward: Forward, device: torch.device) -> Rope:
        """The rotation's tables of cosines, long enough for all rows, with the position of each row's first token."""
        rope = self._tables.rope(rotation, max(span.last_position for span in forward.row_spans), device)
        if not any(span.offset for span in forward.row_spans):
            return rope
        self._counts.follow(forward, device)
        return replace(rope, offset=self._counts.offsets)


class _Counts:
    """Tokens of each row, on the device. A step that adds one token to every row increments them there."""

    def __init__(self) -> None:
        self._forward: Forward | None = None
        self._known: tuple[list[int], list[int]] = ([], [])
        self.tokens = self.offsets = torch.empty(0, dtype=torch.int32)
        self._packed: dict[Window, Tensor] = {}
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

"""Attention of one query per row by the kernels of kvq_kernels, which read a layer's packed tensors as they are.

Several queries per row are `torch_backend`'s. Importing this imports Triton: `backend` does so only where it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from kvq_kernels.decode_attention import Rope, Side, Workspace, plan_splits
from kvq_kernels.decode_attention import decode_attention as attend
from torch import Tensor
from triton import knobs

from kvq_cli.attention import torch_backend
from kvq_cli.attention.forward_context import ForwardContext
from kvq_cli.attention.kernel_sides import norm_of, side, unsupported
from kvq_cli.attention.rotary import Rotation
from kvq_cli.cache.rows import Forward, RowGroup
from kvq_cli.errors import UsageError
from kvq_cli.methods.window import Window

__all__ = ["TritonBackend", "interpreted", "unsupported"]


def interpreted() -> bool:
    """Do kernels run in Triton's interpreter, on a CPU's tensors too? Settled by when kvq_kernels is imported."""
    return knobs.runtime.interpret


class TritonBackend:
    """For all layers of an attached model; see `Backend`. It keeps what layers share, at the same place on the device
    from step to step: how many tokens rows have, tables of cosines that grow with the longest text, workspaces."""

    prefill_attention = staticmethod(torch_backend.prefill_attention)

    def __init__(self) -> None:
        self._counts = _Counts()
        self._ropes: dict[Rotation, tuple[int, Rope]] = {}
        self._workspaces: dict[tuple, Workspace] = {}

    def decode_attention(self, query: Tensor, context: ForwardContext) -> Tensor:
        """softmax(q K^T) V for one query per row, `[batch, query_heads, 1, head_dim]`; zeros for pads. Layers whose
        scores are of another form are not given to kernels."""
        layer, forward = context.layer, context.forward
        keys, values = layer.key_stream, layer.value_stream
        if not keys.ring.shape[3] == values.ring.shape[3] == query.shape[3]:
            raise UsageError(f"layer {layer.index}: keys and values of different head_dim need --backend torch")
        lengths = self._on_device(forward, None, query.device)
        sides = [side(one, self._on_device(forward, one.window, query.device)) for one in (keys, values)]
        rope = None
        if layer.plan.keys.source == "pre_rope" and layer.rotation.style != "none":
            rope = self._rope(layer.rotation, forward, query.device)
        q, norm = query[:, :, 0], norm_of(keys)
        if norm is not None:  # q . (norm k') = (q norm) . k'
            q = (q.unflatten(1, (norm.shape[1], -1)) * norm.unsqueeze(2)).flatten(1, 2).to(query.dtype)
        given = {"rope": rope, "window": layer.sliding_window, "workspace": self._workspace(q, *sides, rope)}
        return attend(q, *sides, lengths, context.scaling, **given, backend="triton").unsqueeze(2)

    def can_capture(self, tokens: int, last_position: int) -> bool:
        """Is all that a step needs on the device, where rows have `tokens` tokens before it?"""
        rooms = (room for room, _ in self._ropes.values())
        return self._counts.known(tokens) and all(_positions(last_position) <= room for room in rooms)

    def tensors(self) -> list[Tensor]:
        """All tensors of its own that a step reads or writes."""
        tables = [table for _, rope in self._ropes.values() for table in (rope.coarse, rope.fine, rope.fine_half)]
        return [*self._counts.tensors(), *tables]

    def advance(self, forward: Forward) -> None:
        """Count a step that was recorded and has been repeated."""
        self._counts.advance(forward)

    def forget(self) -> None:
        """What was counted may not be so on the device: the next step sends it."""
        self._counts.forget()

    def _workspace(self, query: Tensor, keys: Side, values: Side, rope: Rope | None) -> Workspace:
        """One for all layers of the same shapes."""
        splits = plan_splits(query, keys, values, rope)
        place = (query.shape, splits, query.device)
        if place not in self._workspaces:
            self._workspaces[place] = Workspace.like(query, splits)
        return self._workspaces[place]

    def _on_device(self, forward: Forward, window: Window | str | None, device: torch.device) -> Tensor:
        """int32 `[rows]`: tokens of each row, or how many `window` packs, or ("offset") the position of the first."""
        self._counts.follow(forward, device)
        if window is None:
            return self._counts.tokens
        return self._counts.offsets if window == "offset" else self._counts.packed(window)

    def _rope(self, rotation: Rotation, forward: Forward, device: torch.device) -> Rope:
        need = _positions(max(group.last_position for group in forward.row_groups))
        room, rope = self._ropes.get(rotation, (0, None))
        if room < need:
            room = max(2 * room, 1 << (need - 1).bit_length())
            frequencies = rotation.frequencies.to(device)
            rope = Rope.tables(rotation.style, frequencies, room, rotation.scale)
            self._ropes[rotation] = room, rope
        if not any(group.offset for group in forward.row_groups):
            return rope
        return replace(rope, offset=self._on_device(forward, "offset", device))


class _Counts:
    """Tokens of each row on the device. A step that adds one token to every row is counted there: nothing is sent."""

    def __init__(self) -> None:
        self._forward: Forward | None = None
        self._known: tuple[list[int], list[int]] = ([], [])
        self.tokens = self.offsets = torch.empty(0, dtype=torch.int32)
        self._packed: dict[Window, Tensor] = {}
        self._current: set[Window] = set()

    def follow(self, forward: Forward, device: torch.device) -> None:
        """Count the tokens that a pass has brought."""
        if forward is self._forward:
            return
        tokens = _per_row(forward, lambda group: group.tokens)
        offsets = _per_row(forward, lambda group: group.offset)
        if self.tokens.device == device and self._known == ([n - 1 for n in tokens], offsets):
            self.tokens += 1
        else:
            self.tokens, self.offsets = (
                _sent(now, held, device) for now, held in ((tokens, self.tokens), (offsets, self.offsets))
            )
        self._forward, self._known = forward, (tokens, offsets)
        self._current.clear()

    def known(self, tokens: int) -> bool:
        """Was the last step followed, and did it leave every row with `tokens` tokens?"""
        return set(self._known[0]) == {tokens}

    def tensors(self) -> list[Tensor]:
        return [self.tokens, self.offsets, *self._packed.values()]

    def advance(self, forward: Forward) -> None:
        """What `follow` does on the host."""
        self._forward = forward
        self._known = [tokens + 1 for tokens in self._known[0]], self._known[1]

    def forget(self) -> None:
        self._forward, self._known = None, ([], [])

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


def _positions(last: int) -> int:
    """Positions for which there must be cosines: the last tile asks for some more than there are tokens."""
    return last + 1 + Rope.STEP


def _sent(numbers: list[int], held: Tensor, device: torch.device) -> Tensor:
    """The numbers on the device; in the tensor that held others, where they fit in."""
    found = torch.tensor(numbers, dtype=torch.int32)
    return held.copy_(found) if held.shape == found.shape and held.device == device else found.to(device)


def _per_row(forward: Forward, number: Callable[[RowGroup], int]) -> list[int]:
    """A number of each row of the batch, the same for all rows of a group."""
    return [number(group) for group in forward.row_groups for _ in range(group.rows.start, group.rows.stop)]

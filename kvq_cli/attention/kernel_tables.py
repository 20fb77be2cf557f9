"""Tensors that all layers share when kernels decode: workspaces, and tables of cosines.

Importing this imports Triton.
"""

from __future__ import annotations

import torch
from kvq_kernels.decode_attention import Rope, Side, Workspace, plan_splits
from torch import Tensor

from kvq_cli.attention.rotary import Rotation


class KernelTables:
    """Made when they are first needed, and kept at fixed device addresses until a longer text needs more cosines."""

    def __init__(self) -> None:
        self._ropes: dict[Rotation, tuple[int, Rope]] = {}
        self._workspaces: dict[tuple, Workspace] = {}

    def workspace(self, query: Tensor, keys: Side, values: Side, rope: Rope | None) -> Workspace:
        """The workspace of all layers of the same shapes. query: `[rows, query_heads, head_dim]`."""
        splits = plan_splits(query, keys, values, rope)
        key = (query.shape, splits, query.device)
        if key not in self._workspaces:
            self._workspaces[key] = Workspace.like(query, splits)
        return self._workspaces[key]

    def rope(self, rotation: Rotation, last_position: int, device: torch.device) -> Rope:
        """The rotation's tables of cosines up to the position, or further."""
        room = self._ropes[rotation][0] if rotation in self._ropes else 0
        if rotation.style == "none":
            raise ValueError("a layer without RoPE has no tables of cosines")
        if last_position >= room:
            # For at least STEP tokens more: new tables discard captured graphs.
            room = max(2 * room, 1 << (last_position + Rope.STEP).bit_length())
            frequencies = rotation.frequencies.to(device)
            self._ropes[rotation] = room, Rope.tables(rotation.style, frequencies, room, rotation.scale)
        return self._ropes[rotation][1]

    def have(self, last_position: int) -> bool:
        """Whether all tables that were made reach the position."""
        return all(last_position < room for room, _ in self._ropes.values())

    def tensors(self) -> list[Tensor]:
        """The tables of cosines."""
        return [table for _, rope in self._ropes.values() for table in (rope.coarse, rope.fine, rope.fine_half)]

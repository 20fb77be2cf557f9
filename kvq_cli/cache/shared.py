"""What the layers of a pass share: made for the first layer that asks, kept for the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from kvq_cli.methods.window import Window


class Shared:
    """Keeps what layers need alike."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The result of `make` when `key` was first asked for."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


class CachePosition(Shared):
    """The place of a token that is added to every row, where the device alone knows it.

    past: tokens of every row before, int64 `[1]`. All results are int64.
    """

    def __init__(self, past: Tensor) -> None:
        super().__init__()
        self.past = past

    def behind(self, dropped: int) -> CachePosition:
        """The place behind the first `dropped` tokens of every row."""
        return CachePosition(self.past - dropped)

    def ring_place(self, window: Window, size: int) -> Tensor:
        """The token's place in a ring of `size` tokens, `[1]`."""
        return self.kept(("ring", window, size), lambda: (self.past - window.sinks) % size)

    def flush_places(self, window: Window, size: int) -> Tensor:
        """Places in the ring of the tokens that are packed with it, `[flush]`."""
        return self.kept(("flush", window, size), lambda: (self._first(window) + self._counted(window.flush)) % size)

    def entries(self, window: Window, unit: int, count: int) -> Tensor:
        """Places in the store of the `count` entries of `unit` tokens that these become, `[count]`."""
        return self.kept(("entries", window, unit, count), lambda: self._first(window) // unit + self._counted(count))

    def _first(self, window: Window) -> Tensor:
        """The first of them, counted from the sinks on."""
        before = window.sinks + window.recent + window.flush - 1
        return self.kept(("first", window), lambda: self.past - before)

    def _counted(self, count: int) -> Tensor:
        return self.kept(("counted", count), lambda: torch.arange(count, device=self.past.device))

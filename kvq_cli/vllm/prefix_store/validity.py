"""Blocks of vLLM's cache that hold wrong keys and values, because a load failed, until they are computed again."""

from __future__ import annotations

from collections.abc import Sequence


class Validity:
    """vLLM computes a step with blocks that could not be loaded, throws its tokens away, and computes the blocks again;
    with asynchronous scheduling, a step later. Nothing that was computed from them until then may be stored."""

    def __init__(self) -> None:
        self._wrong: set[int] = set()

    def fail(self, blocks: Sequence[int]) -> None:
        """Say that blocks were not loaded."""
        self._wrong.update(blocks)

    def computed(self, prefix: Sequence[int], written: Sequence[int]) -> bool:
        """Say that a step computed the rest of `written` from `prefix`, blocks of one sequence; returns whether what it
        wrote is right."""
        if self._wrong.isdisjoint(prefix):
            self._wrong.difference_update(written)
            return True
        self._wrong.update(written)
        return False

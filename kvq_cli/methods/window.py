"""Windows: which tokens of a sequence are sinks, packed, or recent."""

from __future__ import annotations

from dataclasses import dataclass

from kvq_cli.errors import UsageError


@dataclass(frozen=True)
class Window:
    """The split `sinks | packed | recent` as a function of the total length alone.

    sinks:  first tokens, always kept in full precision.
    recent: minimum number of newest tokens kept in full precision.
    flush:  tokens are packed this many at a time, as soon as there are that many between the two windows.

    Because `packed(n)` depends on n only, feeding tokens one by one leaves the same state as feeding them at once.
    Examples: KIVI keys (R=128): Window(0, 0, 128); KIVI values: Window(0, 128, 1); KIVI+sink keys:
    Window(32, 96, 32); TemporalKV, chunk 4: Window(8, 0, 4).
    """

    sinks: int = 0
    recent: int = 0
    flush: int = 1

    def __post_init__(self) -> None:
        if self.sinks < 0 or self.recent < 0 or self.flush < 1:
            raise UsageError(f"impossible window: sinks={self.sinks}, recent={self.recent}, flush={self.flush}")

    @property
    def ring(self) -> int:
        """Places for recent tokens: a whole number of flushes, so that the tokens of a flush are one slice of them."""
        return (-(-self.recent // self.flush) + 1) * self.flush

    def behind(self, tokens: int) -> Window:
        """The window of the tokens behind the first `tokens`: 0, or all sinks and whole flushes."""
        return Window(0, self.recent, self.flush) if tokens else self

    def packed(self, tokens: int) -> int:
        """How many tokens of a sequence of `tokens` are packed: those at [sinks, sinks + packed)."""
        return max(0, tokens - self.sinks - self.recent) // self.flush * self.flush

"""Which tokens a layer with a sliding window drops, and how much room its streams keep. Needs no PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvq_cli.codecs.base import PromptCodec
from kvq_cli.methods.base import LayerPlan, StreamPlan
from kvq_cli.methods.window import Window


@dataclass(frozen=True)
class Sliding:
    """The cuts of a layer whose queries see the `window` newest tokens of a row, themselves included.

    A layer drops the same number of tokens of every row and of both streams: 0, or `first` + k * `unit`, which is
    behind all sinks and a whole number of flushes behind those of each stream. No later query sees them. They are
    dropped `least` at a time, so that moving those behind them to the front costs little for each token.

    windows: of the streams. rollback: newest tokens that may be removed again: what queries before them see is kept.
    """

    window: int
    windows: tuple[Window, ...]
    first: int
    unit: int
    rollback: int = 0

    @classmethod
    def of(cls, plan: LayerPlan, window: int | None) -> Sliding | None:
        """The cuts of a layer; None for one that keeps all tokens: without a sliding window, of a sum over layers,
        or with codes of all layers, which need the tokens of all of them, and of codecs that store the prompt as one
        chunk."""
        together = plan.cross_layer is not None or plan.joins_layers
        whole = together or any(map(_stores_prompt_apart, plan.kept))
        if window is None or whole:
            return None
        windows = tuple(stream.window for stream in plan.kept)
        unit = math.lcm(*(each.flush for each in windows))
        start = max(each.sinks for each in windows)
        cuts = (
            cut for cut in range(start, start + unit) if all((cut - each.sinks) % each.flush == 0 for each in windows)
        )
        first = next(cuts, None)
        return None if first is None else cls(window, windows, first, unit)

    @property
    def least(self) -> int:
        """Fewest tokens that are dropped at a time: half a window, in whole units."""
        return max(1, -(-self.window // 2 // self.unit)) * self.unit

    @property
    def longest(self) -> int:
        """Most tokens of a row before the first are dropped, where passes add one token to every row."""
        return max(self.first, self.least + self.unit) + self._kept

    def start(self, tokens: int) -> int:
        """How many tokens of a row of `tokens` tokens no later query sees, as far as they may be dropped."""
        # The next query sees itself and window - 1 tokens before it. Tokens in the ring are not dropped.
        unseen = min(tokens + 1 - self.window, *(each.sinks + each.packed(tokens) for each in self.windows))
        return 0 if unseen < self.first else self.first + (unseen - self.first) // self.unit * self.unit

    def dropped(self, lengths: Sequence[int], before: int = 0) -> int:
        """How many tokens are dropped of rows of `lengths` tokens, of which `before` tokens are dropped already."""
        start = self.start(max(0, min(lengths) - self.rollback))
        return start if start - before >= self.least else before

    def room(self, window: Window) -> int:
        """Packed tokens of a stream for which there is room once tokens were dropped: enough for passes that add one
        token to every row, where all rows have as many tokens."""
        return window.behind(1).packed(self.least + self._kept)

    @property
    def _kept(self) -> int:
        """Most tokens of a row behind the last cut, which cannot be dropped."""
        return max(self.window, *(each.recent + each.flush for each in self.windows)) + self.rollback


def _stores_prompt_apart(plan: StreamPlan) -> bool:
    return isinstance(plan.codec, PromptCodec) and plan.codec.stores_prompt_apart

"""KVQuant's values under tensor parallelism: tokens of all heads are packed together, and a rank keeps its heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import Packed, Part
from kvq_cli.codecs.per_token import PerTokenCodec
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Parts that all heads share.
_SIDES = {"zero", "scale", "outlier_index", "outlier_value", "outlier_start"}


class GatheredCodec(PerTokenCodec):
    """Packs tokens over all kv heads, as `PerTokenCodec` does, and keeps the codes of the rank's heads alone.

    whole:     the codec, whose base has one codebook for all heads.
    heads:     the rank's kv heads, adjacent.
    total:     kv heads of all ranks.
    all_heads: `[batch, heads of the rank, tokens, head_dim]` -> `[batch, all heads, tokens, head_dim]`. Every rank
               calls it for the same tokens at the same time.

    Parts: as those of `PerTokenCodec`, `codes` of the rank's heads; `outlier_start` `[.., heads of the rank + 1]`,
    where the outliers of its heads begin in a list that has those of all heads: how many a rank has depends on the
    token.
    """

    def __init__(self, whole: PerTokenCodec, heads: range, total: int, all_heads: Callable[[Tensor], Tensor]) -> None:
        super().__init__(whole.base, len(heads), whole.head_dim, whole.outliers, whole.dtype)
        self._heads, self._total, self._all_heads = heads, total, all_heads

    def _listed_heads(self, heads: int) -> int:
        return self._total

    @property
    def capturable(self) -> bool:
        return False

    def _encode(self, x: Tensor) -> Packed:
        packed = super()._encode(self._all_heads(x))
        kept = slice(self._heads.start, self._heads.stop)
        parts = dict(packed.parts)
        for name in parts.keys() - _SIDES:
            parts[name] = Part(parts[name].tensor[:, kept], parts[name].unit)
        if self.outliers:
            start = parts["outlier_start"]
            parts["outlier_start"] = Part(start.tensor[..., self._heads.start : self._heads.stop + 1], start.unit)
        return Packed(packed.tokens, parts)

    def _in_list(self, first: Tensor, last: Tensor, slots: int) -> Tensor:
        return (first >= 0) & (last <= slots)

    def _head(self, slot: Tensor, start: Tensor) -> Tensor:
        """Below 0, or the number of the rank's heads, for outliers of other ranks' heads."""
        return (slot >= start).sum(-1) - 1

    def _insert(self, x: Tensor, head: Tensor, place: Tensor, values: Tensor) -> None:
        own = (head >= 0) & (head < len(self._heads))  # otherwise of another rank
        row = torch.arange(len(x), device=x.device).unsqueeze(1).expand_as(own)[own]
        x[row, place[own]] = values[own]

"""KVQuant's values under tensor parallelism: tokens of all heads are packed together, and a rank keeps its heads."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvq_cli.codecs.base import Packed, Part, refuse_unless
from kvq_cli.codecs.outliers import check_index
from kvq_cli.codecs.per_token import PerTokenCodec

#: Parts that all heads share.
_SIDES = {"zero", "scale", "outlier_index", "outlier_value", "outlier_start"}


class GatheredCodec(PerTokenCodec):
    """What `PerTokenCodec` packs of all kv heads, without the codes of those that the rank has not.

    whole:     the codec, whose base has one codebook for all heads.
    heads:     the rank's kv heads, adjacent.
    all_heads: `[batch, heads of the rank, tokens, head_dim]` -> `[batch, all heads, tokens, head_dim]`. Every rank
               calls it for the same tokens at the same time.

    Parts: as those of `PerTokenCodec`, `codes` of the rank's heads; `outlier_start` `[.., heads of the rank + 1]`,
    where the outliers of its heads begin in a list that has those of all heads: how many a rank has depends on the
    token.
    """

    def __init__(self, whole: PerTokenCodec, heads: range, all_heads: Callable[[Tensor], Tensor]) -> None:
        vars(self).update(vars(whole))
        self._heads, self._all_heads = heads, all_heads

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

    def check(self, packed: Packed) -> None:
        self.base.check(packed)
        refuse_unless(packed.parts["scale"].tensor >= 0, "scale")
        if self.outliers:
            index, start = (packed.parts[f"outlier_{name}"].tensor for name in ("index", "start"))
            check_index(index, self.block_tokens * self._head_dim)
            refuse_unless(start.diff(dim=3) >= 0, "outlier_start")
            refuse_unless((start[..., 0] >= 0) & (start[..., -1] <= index.shape[3]), "outlier_start")

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        parts = {name: part.tensor for name, part in packed.parts.items()}
        x = self.base.decode(packed, torch.float32).mul_(parts["scale"]).add_(parts["zero"]).to(dtype)
        if self.outliers:
            batch, _, tokens, dim = x.shape
            index, start = (parts[f"outlier_{name}"].squeeze(1).long() for name in ("index", "start"))
            slot = torch.arange(index.shape[2], device=x.device).unsqueeze(1)
            head = (slot >= start[:, :, None]).sum(-1) - 1  # -1, or the number of heads: of another rank
            first = torch.arange(index.shape[1], device=x.device).unsqueeze(1) * (self.block_tokens * dim)
            place = head * (tokens * dim) + first + index
            own = (head >= 0) & (head < len(self._heads))
            row = torch.arange(batch, device=x.device)[:, None, None].expand_as(own)[own]
            x.view(batch, -1)[row, place[own]] = parts["outlier_value"].squeeze(1).to(dtype)[own]
        return x

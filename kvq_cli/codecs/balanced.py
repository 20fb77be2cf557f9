"""KVarN's quantizer (https://arxiv.org/abs/2606.03458): rows and columns of a tile balanced, then rows quantized."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kvq_cli.codecs import bits as bitpack
from kvq_cli.codecs.base import Codec, Packed, Part, refuse_unless, to_side
from kvq_cli.codecs.layout import Layout, PartSpec
from kvq_cli.codecs.ordered_sum import ordered_sum
from kvq_cli.errors import UsageError
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kvq_cli.codecs.uniform import Axis

#: Limits of a deviation, and of the product of all deviations that a row or column is divided by.
_DEVIATION = (1e-3, 1e3)
_PRODUCT = (math.exp(-0.3), math.exp(10))
#: The least deviation that the imbalance divides by, and the least step of a row.
_LEAST_DEVIATION, _LEAST_STEP = 1e-8, 1e-10
#: Dimensions of the tokens and of the channels of tiles `[B, H, T / group, group, D]`.
_TOKENS, _CHANNELS = 3, 4


class BalancedCodec(Codec):
    """x' = (q s + z) t of a tile of `group` tokens: t balances its columns, s and z are of its rows.

    axis "channel": a row is a channel (`group` numbers), a column a token. axis "token": a row is a token (head_dim
    numbers), a column a channel.

    Columns, then rows, are divided by their standard deviations, `iterations` times; the scales c of columns and r of
    rows with the lowest imbalance are taken, where imbalance is the greatest deviation over the least one, of columns
    plus of rows. Rows y of x / (c r) are quantized: q = round((y - l) / d) in [0, 2^b - 1] with l = min y and d =
    (max y - l) / (2^b - 1). Stored are s = r d, z = r l and t = c, in float16 as the authors' code does; q comes from
    numbers that are not rounded.

    The authors sum logarithms of deviations, which is the same product: here it is multiplied, so that a tile has the
    same codes alone, among others and on every device.

    Parts: `codes` int32 `[B, H, T, words]`, planar (see `bits`), unit 1; float16: `scale` and `zero` of rows, `balance`
    of columns: `[B, H, T / group, D]` with unit `group` where these are channels, `[B, H, T, 1]` with unit 1 where they
    are tokens.
    """

    def __init__(self, bits: int, axis: Axis, group: int, head_dim: int, iterations: int = 16) -> None:
        if bits not in bitpack.SPLIT:
            raise UsageError(f"bits={bits}: a balanced tile packs 1, 2, 3, 4 or 8 bits")
        if group < 2:
            raise UsageError(f"group={group}: a tile needs at least 2 tokens to balance its channels")
        self.bits, self.axis, self.head_dim, self.iterations = bits, axis, head_dim, iterations
        self.block_tokens, self.nominal_bits = group, float(bits)
        self._along_row, self._along_column = (_TOKENS, _CHANNELS) if axis == "channel" else (_CHANNELS, _TOKENS)

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        codes = PartSpec(heads, 1, (bitpack.words_per_row(self.bits, dim),), "int32")
        of_channels = PartSpec(heads, self.block_tokens, (dim,), "float16")
        of_tokens = PartSpec(heads, 1, (1,), "float16")
        rows, columns = (of_channels, of_tokens) if self.axis == "channel" else (of_tokens, of_channels)
        return Layout({"codes": codes, "scale": rows, "zero": rows, "balance": columns})

    def check(self, packed: Packed) -> None:
        for name in ("scale", "balance"):
            refuse_unless(packed.parts[name].tensor >= 0, name)

    def _encode(self, x: Tensor) -> Packed:
        tiles = x.float().unflatten(2, (-1, self.block_tokens))
        column, row = self._balance(tiles)
        y = tiles / column / row
        least, most = (side + 0.0 for side in y.aminmax(dim=self._along_row, keepdim=True))  # no minus zero
        step = ((most - least) / (2**self.bits - 1)).clamp_min_(_LEAST_STEP)
        codes = ((y - least) / step).round_().clamp_(0, 2**self.bits - 1).to(torch.uint8).view(x.shape)
        sides = {"scale": row * step, "zero": row * least, "balance": column}
        parts = {name: self._part(to_side(side, "float16")) for name, side in sides.items()}
        return Packed(x.shape[2], {"codes": Part(bitpack.pack(codes, self.bits), 1), **parts})

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        codes = bitpack.unpack(packed.parts["codes"].tensor, self.bits, self.head_dim).float()
        scale, zero, balance = (self._side(packed.parts[name]) for name in ("scale", "zero", "balance"))
        codes.unflatten(2, (-1, self.block_tokens)).mul_(scale).add_(zero).mul_(balance)
        return codes.to(dtype)

    def _balance(self, tiles: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales of columns and of rows of tiles, `[B, H, T / group, group | 1, D | 1]`."""
        column, row = (torch.ones_like(tiles.narrow(dim, 0, 1)) for dim in (self._along_column, self._along_row))
        best = (column, row)
        deviation, imbalance = self._deviations(tiles)
        for _ in range(self.iterations):
            column = (column * deviation.clamp(*_DEVIATION)).clamp_(*_PRODUCT)
            across = _deviation(tiles / column / row, self._along_row)
            row = (row * across.clamp_(*_DEVIATION)).clamp_(*_PRODUCT)
            deviation, other = self._deviations(tiles / column / row)
            better = other <= imbalance
            best = torch.where(better, column, best[0]), torch.where(better, row, best[1])
            imbalance = torch.where(better, other, imbalance)
        return best

    def _deviations(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return standard deviations of columns, and the imbalance `[B, H, T / group, 1, 1]`."""
        columns, rows = _deviation(y, self._along_column), _deviation(y, self._along_row)
        ratios = [s.amax((3, 4), keepdim=True) / s.amin((3, 4), keepdim=True).clamp_min_(_LEAST_DEVIATION)
                  for s in (columns, rows)]  # fmt: skip
        return columns, ratios[0] + ratios[1]

    def _part(self, side: Tensor) -> Part:
        """Return the part of a side of tiles, which has one number for each channel or for each token."""
        of_channels = side.shape[_TOKENS] == 1
        return Part(side.squeeze(_TOKENS), self.block_tokens) if of_channels else Part(side.flatten(2, 3), 1)

    def _side(self, part: Part) -> Tensor:
        """Return the inverse of `_part`, float32."""
        x = part.tensor.float()
        return x.unsqueeze(_TOKENS) if part.unit > 1 else x.unflatten(2, (-1, self.block_tokens))


def _deviation(y: Tensor, dim: int) -> Tensor:
    """Return the standard deviation (of n - 1) along a dimension, which is kept."""
    count = y.shape[dim]
    distances = y - ordered_sum(y, dim) / count
    return (ordered_sum(distances.square_(), dim) / (count - 1)).sqrt_()

"""The gain of a token: the size of its components relative to calibration, a power of 2^(1/16) stored in 8 bits."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from kvq_cli.codecs.exact_product import grid_bits
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from kvq_kernels.transform_pack import GainTables
    from torch import Tensor

#: Gains per factor of two.
_PER_OCTAVE = 16
#: The index of gain 1.
_ONE = 128
#: Numbers are clamped to this many deviations, at least the greatest gain.
_MAX_DEVIATIONS = 2.0**8

#: A component of the first half, which has the most bits, is at most so many deviations times the gain: its codes reach
#: 3 to 6, and what lies beyond is lost. Few tokens of the calibration text do, many of some other text.
_REACH = 4.0
#: The largest deviation, in steps, of components that are constant.
_CONSTANT = 1e-30


class Gain:
    """g = the greater of the root of the mean of z^2, z = u / deviation, and a quarter of the largest |z| of the first
    half of the components; rounded to 2^((n - 128) / 16), n in 0..255.

    Squares are added as integers below 2^53, and compared: n is the same for a token alone and among others. deviation:
    `[G, K]`, 0 where a component is always 0.
    """

    def __init__(self, deviation: Tensor) -> None:
        groups, components = deviation.shape
        unit = _MAX_DEVIATIONS / 2.0 ** grid_bits(components)
        constant = deviation <= _CONSTANT
        #: To integers: `[G, 1, K]`.
        self.scale = (1 / unit / deviation).masked_fill(constant, 0).view(groups, 1, components)
        self._limit, self._first = _MAX_DEVIATIONS / unit, max(1, components // 2)
        # The sum of squares, and the largest square, of a token of gain 1.
        self._sum, self._largest = components / unit**2, (_REACH / unit) ** 2
        gains(deviation.device)  # a CUDA graph cannot hold their copy to the GPU

    def tables(self) -> GainTables:
        """What kernels find gains by."""
        from kvq_kernels.transform_pack import GainTables

        device = self.scale.device
        constants = self._limit, self._sum, self._largest, self._first
        return GainTables(self.scale.squeeze(1), _limits(device), gains(device), *constants)

    def index(self, u: Tensor) -> Tensor:
        """n of `u` `[B, G, T, K]`: uint8 `[B, G, T]`."""
        grid = (u * self.scale).round_().clamp_(-self._limit, self._limit).double()
        squares = grid.square_()
        square = torch.maximum(squares.sum(dim=3) / self._sum, squares[..., : self._first].amax(dim=3) / self._largest)
        return torch.bucketize(square, _limits(u.device), right=True).to(torch.uint8)


@cache
def gains(device: torch.device) -> Tensor:
    """All gains, float32 `[256]`, rounded to float16: kernels multiply by them in it."""
    _limits(device)
    numbers = [2.0 ** ((n - _ONE) / _PER_OCTAVE) for n in range(256)]
    return torch.tensor(numbers, dtype=torch.float16, device=device).float()


@cache
def _limits(device: torch.device) -> Tensor:
    """Mean squares from which on n is 1, 2, ... 255: halfway between two gains, in octaves. Float64."""
    numbers = [2.0 ** (2 * (n - 0.5 - _ONE) / _PER_OCTAVE) for n in range(1, 256)]
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def gain_of(index: Tensor) -> Tensor:
    """The gains of indices `[...]` uint8, float32."""
    return gains(index.device).index_select(0, index.reshape(-1).int()).view(index.shape)

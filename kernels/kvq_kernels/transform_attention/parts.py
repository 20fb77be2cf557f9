"""Inputs of `transform_attention`: packed codes of a transform's components, and the transform."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvq_kernels import fields
from kvq_kernels.decode_attention.parts import Side
from kvq_kernels.transform_attention.codes import operand_components

#: Factors on float16 operands: a code is the number code * 2^(offset - 24), and S' of float16 at most 2^15.
CODE, OPERAND = 2.0**24, 2.0**15


@dataclass(frozen=True)
class Operands:
    """A transform as the kernel multiplies by it.

    synthesis: `[H, operand_components, D]`: S' with the factor of each field's codes, then -S center for what is 1, 0.
               Keys: float16, in units of `unit`, -S center as two numbers; values: float32.
    mean:      `[H, D]`, likewise.
    unit:      of keys, float32 `[H, D]`, a power of two for each channel, the same for both channels of a pair that
               `rotation` (style, width) rotates.
    """

    synthesis: Tensor
    mean: Tensor
    unit: Tensor | None = None
    rotation: tuple[str, int] | None = None


@cache
def lane_shifts(device: torch.device) -> Tensor:
    """int32 `[2, 8]`: how far the codes of a lane are shifted in a word of 2 lanes, and of 4."""
    lane = torch.arange(fields.VALUE_LANES, device=device, dtype=torch.int32)
    return torch.stack([lane % 2 * 16, lane % 4 * 8])


@dataclass(frozen=True)
class Transform:
    """x' = g S (c - center) + mean of each group of kv heads, with codes c and gain g.

    widths: bits of each field of 8 components. synthesis: S float32 `[G, W, K]`, W = D, or H D of a group of all heads.
    mean: float32 `[G, W]`. center: float32 `[G, K]`. operands: of the kernel, None where it does not compute with them.
    """

    widths: tuple[int, ...]
    synthesis: Tensor
    mean: Tensor
    center: Tensor
    operands: Operands | None = None

    @classmethod
    def of_keys(
        cls,
        widths: tuple[int, ...],
        synthesis: Tensor,
        mean: Tensor,
        center: Tensor,
        dim: int,
        rotation: tuple[str, int] | None,
    ) -> Transform:
        """The transform of keys that RoPE rotates, in a style, so many channels of `dim`; None: no RoPE."""
        plain = cls(widths, synthesis, mean, center)
        if not plain._per_head(dim):
            return plain
        largest = torch.maximum(synthesis.abs().amax(2), mean.abs() / CODE)
        if rotation is not None:
            largest = _of_pairs(largest, *rotation)
        unit = torch.exp2(largest.clamp_min(1e-20).log2().ceil()) * (CODE / OPERAND)
        factors = plain._factors()
        scaled = ((synthesis / unit[:, :, None]).mT * factors[:, None]).half()
        # Of the rounded S', so that errors are of codes minus center.
        offset = -((center / factors)[:, None] @ scaled.float())
        ones = torch.cat([offset.half(), (offset - offset.half()).half()], dim=1)
        return cls(
            widths, synthesis, mean, center, Operands(plain._padded(scaled, ones), (mean / unit).half(), unit, rotation)
        )

    @classmethod
    def of_values(cls, widths: tuple[int, ...], synthesis: Tensor, mean: Tensor, center: Tensor, dim: int) -> Transform:
        """The transform of values."""
        plain = cls(widths, synthesis, mean, center)
        if not plain._per_head(dim):
            return plain
        scaled, offset = synthesis.mT * plain._factors()[:, None], -(synthesis @ center[:, :, None]).mT
        return cls(widths, synthesis, mean, center, Operands(plain._padded(scaled, offset), mean.contiguous()))

    def _padded(self, *rows: Tensor) -> Tensor:
        """`[H, operand_components, D]`: the rows, then zeros."""
        missing = operand_components(self.widths) - sum(x.shape[1] for x in rows)
        zeros = rows[0].new_zeros(len(rows[0]), missing, rows[0].shape[2])
        return torch.cat([*rows, zeros], dim=1).contiguous()

    def _per_head(self, dim: int) -> bool:
        """Whether the kernel computes with it: a group is one head, and keeps some components."""
        return self.mean.shape[1] == dim and len(self.widths) > 0

    def _factors(self) -> Tensor:
        """`[K]`: 2^(24 - offset), by which a code's float16 number is the code."""
        places = fields.places(self.widths)
        powers = [CODE / 2**place.offset for place in places for _ in range(fields.FIELD)]
        return torch.tensor(powers, device=self.mean.device)


def _of_pairs(x: Tensor, style: str, width: int) -> Tensor:
    """`[H, D]`: the larger of both channels of each rotated pair; other channels as they are."""
    rotated, rest = x[:, :width], x[:, width:]
    if style == "half":
        rotated = rotated.unflatten(1, (2, width // 2)).amax(1).repeat(1, 2)
    else:
        rotated = rotated.unflatten(1, (width // 2, 2)).amax(2).repeat_interleave(2, dim=1)
    return torch.cat([rotated, rest], dim=1)


@dataclass(frozen=True)
class Transformed:
    """Keys (before RoPE) or values, packed as codes of a transform's components.

    codes: tensors of the parts that `fields` has for the widths, in order, each contiguous from the token axis on:
           keys `[B, G, T, 4, words]`, values `[B, G, T / 16, 8, 8, words]`; T is a multiple of 16. Empty where nothing
           was packed yet.
    gain:  uint8 n `[B, G, T]`: g = 2^((n - 128) / 16), rounded to float16; None: g = 1.
    exact: count, a multiple of 16, sinks and ring as in any `Side`; its `packed` is not read.
    """

    codes: tuple[Tensor, ...]
    gain: Tensor | None
    transform: Transform
    exact: Side

    @property
    def heads(self) -> int:
        """Number of kv heads."""
        exact = self.exact.sinks if self.exact.ring is None else self.exact.ring
        assert exact is not None
        return exact.shape[1]

    @property
    def room(self) -> int:
        """Packed tokens per row that there is room for: how many there are is known on the device alone."""
        if not self.codes:
            return 0
        codes = self.codes[0]
        return codes.shape[2] * (1 if codes.shape[3] == fields.KEY_LANES else fields.BLOCK)

    @property
    def sinks(self) -> int:
        """Number of sinks."""
        return 0 if self.exact.sinks is None else self.exact.sinks.shape[2]

    @property
    def recent(self) -> int:
        """Tokens that the ring buffer holds."""
        return 0 if self.exact.ring is None else self.exact.ring.shape[2]

"""Keys or values that are packed as codes of a transform's components: tensors, and unpacking in PyTorch.

`transform_attention` reads this format, `fields.py` has the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from kvq_kernels import fields
from kvq_kernels.decode_attention.formats.format import Format, Stored

#: Factors on float16 operands: a code is the number code * 2^(offset - 24), and S' of float16 at most 2^15.
CODE, OPERAND = 2.0**24, 2.0**15


def operand_components(widths: tuple[int, ...]) -> int:
    """Kept components and at least one field that is 1, in whole products: the inner size of one is 16."""
    return 16 * (len(widths) // 2 + 1)


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
class Transformed(Format):
    """Keys (before RoPE) or values, packed as codes of a transform's components.

    codes: tensors of the parts that `fields` has for the widths, in order, each contiguous from the token axis on:
           keys `[B, G, T, 4, words]`, values `[B, G, T / 16, 8, 8, words]`; T is a multiple of 16.
    gain:  uint8 n `[B, G, T]`: g = 2^((n - 128) / 16), rounded to float16; None: g = 1.
    """

    codes: tuple[Tensor, ...]
    gain: Tensor | None
    transform: Transform

    @property
    def block(self) -> int:
        """Tokens of an entry of the codes' token axis."""
        return 1 if self.codes[0].shape[-2] == fields.KEY_LANES else fields.BLOCK

    @property
    def entry(self) -> int:
        """First axis behind the codes' token axis."""
        return -2 if self.block == 1 else -3

    @property
    def heads(self) -> None:
        """Not known: one transform may be of several heads."""

    def stored(self) -> list[Stored]:
        codes = [(f"codes{number}", x.flatten(self.entry), self.block) for number, x in enumerate(self.codes)]
        return [*codes, ("gain", None if self.gain is None else self.gain.unsqueeze(-1), 1)]

    def changed(self, change: Callable[[Tensor], Tensor]) -> Transformed:
        entry = self.entry
        codes = tuple(change(x.flatten(entry)).unflatten(-1, x.shape[entry:]) for x in self.codes)
        gain = None if self.gain is None else change(self.gain.unsqueeze(-1)).squeeze(-1)
        return replace(self, codes=codes, gain=gain)

    def unpack(self, dtype: torch.dtype, dim: int | None = None) -> Tensor:
        assert dim is not None
        return restore(self, dtype, dim)

    def spec(self, dim: int, **of_side: Any) -> NoReturn:
        raise ValueError("codes of a transform's components are read by transform_attention alone")

    def pointers(self) -> NoReturn:
        self.spec(0)

    def strides(self) -> NoReturn:
        self.spec(0)

    def page_strides(self, heads: Mapping[str, int]) -> NoReturn:
        self.spec(0)


def restore(packed: Transformed, dtype: torch.dtype, dim: int) -> Tensor:
    """Tokens g S (c - center) + mean, `[B, H, T, dim]` in `dtype`, computed in it, but at least in float32."""
    wide, transform = torch.promote_types(dtype, torch.float32), packed.transform
    z = unpack_fields(packed.codes, transform.widths).to(wide) - transform.center.to(wide)[:, None]
    if packed.gain is not None:
        z = z * torch.exp2((packed.gain.float() - 128) / 16).half().to(wide)[..., None]
    x = z @ transform.synthesis.to(wide).mT + transform.mean.to(wide)[:, None]  # [B, G, T, W]
    return x.unflatten(3, (-1, dim)).transpose(2, 3).flatten(1, 2).to(dtype)


def unpack_fields(codes: tuple[Tensor, ...], widths: tuple[int, ...]) -> Tensor:
    """Codes `[B, G, T, K]`, int32, of the tensors of all parts, of keys or values."""
    parts, read = fields.parts(fields.rate(widths)), []
    for place, width in zip(fields.places(widths), widths, strict=True):
        words, at = codes[place.part][..., place.word].int(), place.shift + place.offset
        halves = torch.stack([words >> at, words >> (at + parts[place.part].room)], dim=-1) & (2**width - 1)
        if codes[0].shape[3] == fields.KEY_LANES:  # [B, G, T, 4, 2]
            read.append(halves.flatten(3))
        else:  # [B, G, T / 16, 8, 8, 2]
            read.append(halves.transpose(4, 5).flatten(2, 4))
    if not read:
        rows, groups = codes[0].shape[:2]
        tokens = codes[0].shape[2] * (1 if codes[0].shape[3] == fields.KEY_LANES else fields.BLOCK)
        return codes[0].new_empty(rows, groups, tokens, 0, dtype=torch.int32)
    return torch.cat(read, dim=3)

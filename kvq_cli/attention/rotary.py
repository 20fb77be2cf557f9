"""The rotary position embedding of a model: style, width, frequencies, scale.

A key of position p is R(p) k: each pair of channels (i, j) turned by p f, times `scale` (YaRN's), where (i, j) is
(n, n + width / 2) in style "half" (Llama) and (2n, 2n + 1) in style "interleaved" (GLM, Cohere). Channels from `width`
on are not rotated (Phi3, GLM). Style "none" is a layer without RoPE.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from kvq_cli.codecs.base import KeyRotation

#: Which channels form the rotated pairs: see above.
Style = Literal["half", "interleaved", "none"]
STYLES: tuple[Style, ...] = ("half", "interleaved")
#: Tokens that `Rotation.ahead` rotates at once.
TILE = 4096


@dataclass(frozen=True, eq=False)
class Rotation:
    """style: "half", "interleaved" or "none". frequencies: `[width / 2]` float32, radians per position."""

    style: Style
    frequencies: Tensor
    head_dim: int
    scale: float = 1.0
    _kept: dict = field(default_factory=dict, repr=False)

    @property
    def width(self) -> int:
        """How many of the head's first channels are rotated."""
        return 2 * self.frequencies.numel()

    @property
    def of_keys(self) -> KeyRotation:
        """How keys are rotated, as codecs take it."""
        return None if self.style == "none" else (self.style, self.width)

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos `[*positions.shape, head_dim]`, 1 for channels that are not rotated, sin `[*positions.shape, width / 2]`,
        float32, both times the scale."""
        angles = positions.to(self.frequencies.device).float().unsqueeze(-1) * self.frequencies
        cos = angles.new_ones(*positions.shape, self.head_dim)
        for channels in self._pair:
            cos[..., channels] = angles.cos() * self.scale
        return cos, angles.sin().mul_(self.scale)

    def _counted(self, start: int, tokens: int) -> Tensor:
        """Positions start, start + 1, ..., made where the tables are: a copy to a GPU would wait for it."""
        return torch.arange(start, start + tokens, device=self.frequencies.device)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """R x of `x` `[..., tokens, head_dim]` float32 with the `tables` of its positions."""
        if self.style == "none":
            return x
        first, second = self._pair
        out = x * cos
        out[..., first].addcmul_(x[..., second], sin, value=-1)
        out[..., second].addcmul_(x[..., first], sin)
        return out

    def at(self, x: Tensor, start: int) -> Tensor:
        """`x` `[..., tokens, head_dim]` float32 rotated to positions start, start + 1, ...."""
        return self.rotate(x, *self.tables(self._counted(start, x.shape[-2])))

    def undo(self, x: Tensor, start: int) -> Tensor:
        """`x` before `at` rotated it."""
        if self.style == "none":
            return x
        cos, sin = self.tables(self._counted(start, x.shape[-2]))
        for channels in self._pair:
            cos[..., channels] /= self.scale**2
        return self.rotate(x, cos, -sin / self.scale**2)

    # Keys of a long text are rotated without a table as long as the text: R(s + i) = R(s) R(i), and q . R(s) R(i) k is
    # the product of R(-s) q, rotated `back` once, with R(i) k, rotated `ahead` by the same table for every s.

    def back(self, query: Tensor, starts: tuple[int, ...]) -> Tensor:
        """R(-s) query for each position s of `starts`: float32 `[..., head_dim]` -> `[starts, ..., head_dim]`."""
        expanded = query.expand(len(starts), *query.shape)
        if self.style == "none":
            return expanded
        return self.rotate(expanded, *self._start_tables(starts, query.ndim))

    def ahead(self, keys: Tensor) -> Tensor:
        """R(i) of key i; `keys` `[..., tokens, head_dim]` float32, at most `TILE` tokens. The result lies in memory as
        they do, token by token or channel by channel."""
        if self.style == "none":
            return keys
        tokens = keys.shape[-2]
        if keys.stride(-1) == 1:
            cos, sin = self._tile_tables
            return self.rotate(keys, cos[:tokens], sin[:tokens])
        # The same with tables that lie as the keys do: several times faster on a CPU.
        cos, sin = self._tile_tables_by_channel
        return self.rotate(keys, cos[:, :tokens].mT, sin[:, :tokens].mT)

    @cached_property
    def _tile_tables(self) -> tuple[Tensor, Tensor]:
        return self.tables(torch.arange(TILE))

    @cached_property
    def _tile_tables_by_channel(self) -> tuple[Tensor, Tensor]:
        cos, sin = self._tile_tables
        return cos.T.contiguous(), sin.T.contiguous()

    def _start_tables(self, starts: tuple[int, ...], ndim: int) -> tuple[Tensor, Tensor]:
        """Tables of the positions -s, without the scale; cached, since other layers need the same."""
        kept = self._kept.get("starts")  # read once: other threads may replace it
        if kept is None or kept[0] != (starts, ndim):
            cos, sin = (x.view(-1, *[1] * (ndim - 1), x.shape[-1]) for x in self.tables(-torch.tensor(starts)))
            for channels in self._pair:
                cos[..., channels] /= self.scale
            kept = self._kept["starts"] = ((starts, ndim), (cos, sin / self.scale))
        return kept[1]

    def same(self, other: Rotation) -> bool:
        """Whether both are the same rotation."""
        alike = self.style == other.style and self.scale == other.scale
        return alike and torch.equal(self.frequencies, other.frequencies)

    def agrees(self, cos: Tensor, sin: Tensor, position: int) -> bool:
        """Whether (cos, sin) `[width]`, in half or interleaved layout, are the tables of `position`."""
        half = self.width // 2
        all_cos, pair_sin = self.tables(torch.tensor(position))
        expected = torch.cat([all_cos[self._pair[0]], pair_sin])
        tolerance = 4 * torch.finfo(cos.dtype).eps * max(1.0, self.scale) + 1e-4
        layouts = (slice(0, half), slice(0, self.width, 2))
        return any(_near(expected, torch.cat([cos[cut], sin[cut]]).to(expected), tolerance) for cut in layouts)

    def turns(self, before: Tensor, after: Tensor) -> bool:
        """Whether `after` is R(i) of key i of `before`, both `[..., tokens, head_dim]`, within the rounding of their
        dtype.

        Each pair of channels is compared by its own size: a pair that turns slowly may be so much larger than the
        others, as with biases of keys, that the rounding of all would hide the others' rotation.
        """
        sizes = before.float().abs()
        first, second = self._pair
        sizes[..., first] = sizes[..., second] = torch.hypot(sizes[..., first], sizes[..., second]) * self.scale
        precision = torch.finfo(after.dtype)
        tolerance = 8 * (precision.eps * sizes + precision.smallest_normal)
        return bool(((self.at(before.float(), 0) - after.float()).abs() <= tolerance).all())

    @cached_property
    def _pair(self) -> tuple[slice, slice]:
        """The channels of the first and of the second number of all pairs."""
        half, width = self.width // 2, self.width
        if self.style == "half":
            return slice(0, half), slice(half, width)
        return slice(0, width, 2), slice(1, width, 2)


def shared(rotations: Iterable[Rotation]) -> list[Rotation]:
    """The rotations with one object for all that are the same: tables that are kept for an object are then kept
    once."""
    distinct: list[Rotation] = []
    result = []
    for rotation in rotations:
        known = next((other for other in distinct if other.same(rotation)), None)
        if known is None:
            distinct.append(rotation)
        result.append(rotation if known is None else known)
    return result


def find_rotation(rotary: nn.Module | None, kind: str, before: Tensor, after: Tensor) -> Rotation | None:
    """The rotation that turns `before` into `after`, both `[1, kv_heads, tokens, head_dim]` at positions 0, 1, ....

    rotary: the model's own rotary module, whose frequencies are used. kind: the layer's entry in `layer_types`; it
    chooses among several sets of frequencies (Gemma3). None where no style of rotation matches.
    """
    if torch.equal(before, after):
        return Rotation("none", torch.zeros(0, dtype=torch.float32, device=after.device), after.shape[-1])
    described = _frequencies(rotary, kind)
    if described is None:
        return None
    frequencies, scale = described
    for style in STYLES:
        rotation = Rotation(style, frequencies.to(before.device), before.shape[-1], scale)
        if rotation.width <= rotation.head_dim and rotation.turns(before, after):
            return rotation
    return None


def has_fixed_rope(decoder: nn.Module) -> bool:
    """Whether all rotary modules of the model have frequencies that do not depend on the length of the text."""
    types = [module.rope_type for module in decoder.modules() if hasattr(module, "rope_type")]
    kinds = [kind for rope in types for kind in (rope.values() if isinstance(rope, dict) else [rope])]
    return bool(kinds) and all("dynamic" not in str(kind) and kind != "longrope" for kind in kinds)


def _frequencies(rotary: nn.Module | None, kind: str) -> tuple[Tensor, float] | None:
    """(frequencies float32, scale) of the rotary module for layers of this kind."""
    for prefix in (f"{kind}_", ""):
        frequencies = getattr(rotary, f"{prefix}inv_freq", None)
        if frequencies is not None:
            return frequencies.detach().float(), float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
    return None


def _near(x: Tensor, y: Tensor, tolerance: float) -> bool:
    return (x - y.float()).abs().max().item() <= tolerance

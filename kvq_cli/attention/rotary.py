"""Rotary position embedding as the model does it, described once: style, width, frequencies, scale.

A key of position p is R(p) k: each pair of channels (i, j) turned by p f, times `scale` (YaRN's), where (i, j) is
(n, n + width / 2) in style "half" (Llama) and (2n, 2n + 1) in style "interleaved" (GLM, Cohere). Channels from `width`
on are left alone (Phi3, GLM). Style "none" is a layer without RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

STYLES = ("half", "interleaved")


@dataclass(frozen=True, eq=False)
class Rotation:
    """style: "half", "interleaved" or "none". frequencies: `[width / 2]` float32, radians per position."""

    style: str
    frequencies: Tensor
    scale: float = 1.0

    @property
    def width(self) -> int:
        """How many of the head's first channels are rotated."""
        return 2 * self.frequencies.numel()

    def tables(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin) float32, each `[*positions.shape, width / 2]`, times the scale."""
        angles = positions.to(self.frequencies.device).float().unsqueeze(-1) * self.frequencies
        return angles.cos().mul_(self.scale), angles.sin().mul_(self.scale)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """R x of `x` `[..., tokens, head_dim]`, float32, with (cos, sin) `[tokens, width / 2]` or broadcastable."""
        x = x.float()
        if self.style == "none":
            return x
        first, second = self._pairs()
        out = x.clone()
        one, two = x[..., first], x[..., second]
        out[..., first] = one * cos - two * sin
        out[..., second] = two * cos + one * sin
        return out

    def at(self, x: Tensor, positions: Tensor) -> Tensor:
        """`x` `[batch, heads, tokens, head_dim]` rotated to `positions` `[tokens]`, float32."""
        return self.rotate(x, *self.tables(positions))

    def same(self, other: Rotation) -> bool:
        """Do both turn every key alike?"""
        alike = self.style == other.style and self.scale == other.scale
        return alike and torch.equal(self.frequencies, other.frequencies)

    def agrees(self, cos: Tensor, sin: Tensor, position: int) -> bool:
        """Are (cos, sin) `[width]` the model's tables of `position`? Whether pairs lie apart or beside each other."""
        half = self.width // 2
        own = torch.cat(self.tables(torch.tensor(position)))
        tolerance = 4 * torch.finfo(cos.dtype).eps * max(1.0, self.scale) + 1e-4
        layouts = (slice(0, half), slice(0, self.width, 2))
        return any(_near(own, torch.cat([cos[cut], sin[cut]]).to(own), tolerance) for cut in layouts)

    def _pairs(self) -> tuple[slice, slice]:
        half, width = self.width // 2, self.width
        if self.style == "half":
            return slice(0, half), slice(half, width)
        return slice(0, width, 2), slice(1, width, 2)


def find_rotation(rotary: nn.Module | None, kind: str, before: Tensor, after: Tensor) -> Rotation | None:
    """The rotation that turns `before` into `after`, both `[1, kv_heads, tokens, head_dim]` at positions 0, 1, ....

    rotary: the model's own rotary module, whose frequencies are used. kind: the layer's entry in `layer_types`; it
    chooses among several sets of frequencies (Gemma3). None where no style of rotation does it.
    """
    tolerance = 8 * torch.finfo(after.dtype).eps * after.float().abs().max().item()
    if _near(before.float(), after, tolerance):
        return Rotation("none", torch.zeros(0, device=after.device))
    found = _frequencies(rotary, kind)
    if found is None:
        return None
    frequencies, scale = found
    positions = torch.arange(before.shape[2], device=before.device)
    for style in STYLES:
        rotation = Rotation(style, frequencies.to(before.device), scale)
        if rotation.width <= before.shape[-1] and _near(rotation.at(before, positions), after, tolerance):
            return rotation
    return None


def _frequencies(rotary: nn.Module | None, kind: str) -> tuple[Tensor, float] | None:
    """(frequencies float32, scale) of the rotary module for layers of this kind."""
    for prefix in (f"{kind}_", ""):
        frequencies = getattr(rotary, f"{prefix}inv_freq", None)
        if frequencies is not None:
            return frequencies.detach().float(), float(getattr(rotary, f"{prefix}attention_scaling", 1.0))
    return None


def _near(x: Tensor, y: Tensor, tolerance: float) -> bool:
    return (x - y.float()).abs().max().item() <= tolerance

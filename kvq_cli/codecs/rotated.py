"""A Hadamard rotation of the channels of a head around any codec (QuaRot, TurboQuant)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor

from kvq_cli.codecs.base import Codec, Packed
from kvq_cli.codecs.hadamard import factors, hadamard


class RotatedCodec(Codec):
    """`base` encodes H D x, where H is the orthonormal Hadamard matrix of head_dim and D flips signs; decoding undoes
    both.

    q . x = (H D q) . (H D x): scores of rotated queries with rotated keys are those of the keys, and a weighted sum of
    values is rotated back once. Parts are those of `base`.

    flip: D flips random signs, the same for all heads and layers; off: D is the identity.
    Raises UsageError for a head_dim that has no Hadamard matrix here (`hadamard.factors`).
    """

    def __init__(self, base: Codec, head_dim: int, flip: bool = False) -> None:
        factors(head_dim)
        self.base, self._head_dim, self._flip = base, head_dim, flip
        self.block_tokens, self.nominal_bits = base.block_tokens, base.nominal_bits

    def constants(self) -> Mapping[str, Tensor]:
        signs = {"signs": random_signs(self._head_dim, torch.device("cpu"))} if self._flip else {}
        return {**self.base.constants(), **signs}

    def check(self, packed: Packed) -> None:
        self.base.check(packed)

    def rotate(self, x: Tensor) -> Tensor:
        """H D x of `[..., head_dim]`, float32."""
        return hadamard(x.float() * random_signs(self._head_dim, x.device) if self._flip else x)

    def _rotate_back(self, y: Tensor) -> Tensor:
        x = hadamard(y, inverse=True)
        return x.mul_(random_signs(self._head_dim, x.device)) if self._flip else x

    def _encode(self, x: Tensor) -> Packed:
        return self.base.encode(self.rotate(x))

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return self._rotate_back(self.base.decode(packed, torch.float32)).to(dtype)

    def products(self, queries: Tensor, packed: Packed) -> Tensor:
        return self.base.products(self.rotate(queries), packed)

    def weighted_sum(self, weights: Tensor, packed: Packed) -> Tensor:
        return self._rotate_back(self.base.weighted_sum(weights, packed))


@cache
def random_signs(width: int, device: torch.device) -> Tensor:
    """1 or -1 for each channel, float32 `[width]`, the same on all machines."""
    bits = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(0))
    return (2.0 * bits - 1).to(device)

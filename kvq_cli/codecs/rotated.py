"""A rotation of the channels of each head around any codec (QuaRot, TurboQuant, OPQ)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import Codec, Packed
from kvq_cli.codecs.exact_product import ExactProduct, product_layout
from kvq_cli.codecs.hadamard import factors, hadamard
from kvq_cli.codecs.layout import Layout, TensorLike, TensorSpec, spec_of
from kvq_cli.codecs.wrapped import WrappedCodec
from kvq_cli.errors import UsageError
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


class ChannelRotation(ABC):
    """An orthogonal matrix R for the channels of each kv head."""

    @abstractmethod
    def ahead(self, x: Tensor) -> Tensor:
        """R x of `[batch, kv_heads, tokens, head_dim]`, float32: the same for a token alone and among others."""

    def queries(self, q: Tensor) -> Tensor:
        """R q, float32."""
        return self.ahead(q)

    @abstractmethod
    def back(self, y: Tensor) -> Tensor:
        """R^T y, float32."""

    @abstractmethod
    def transposed(self, device: torch.device) -> Tensor:
        """R^T, `[head_dim, head_dim]` or `[kv_heads, head_dim, head_dim]` float32: rows times it are rotated in one
        product, to rounding as `ahead` does."""

    def constants(self) -> Mapping[str, Tensor]:
        """Tensors held for all sequences."""
        return {}

    def layout(self) -> Mapping[str, TensorSpec]:
        """Shapes and dtypes of `constants`."""
        return {}


class HadamardRotation(ChannelRotation):
    """R = H D: H is the orthonormal Hadamard matrix of head_dim, D flips signs.

    flip:  D flips random signs, one table for all heads and layers of a process; off: D is the identity.
    block: H is that of so many channels, for each run of them (block-diagonal), and D repeats; None: of head_dim.
    Raises UsageError for a block that has no Hadamard matrix here (`hadamard.factors`), or does not divide head_dim.
    """

    def __init__(self, head_dim: int, flip: bool = False, block: int | None = None) -> None:
        self._head_dim, self._block, self._flip = head_dim, block or head_dim, flip
        factors(self._block)
        if head_dim % self._block:
            raise UsageError(f"a Hadamard rotation of {block} channels does not divide head_dim={head_dim}")

    def ahead(self, x: Tensor) -> Tensor:
        x = x.unflatten(-1, (-1, self._block))
        return hadamard(x.float() * random_signs(self._block, x.device) if self._flip else x).flatten(-2)

    def back(self, y: Tensor) -> Tensor:
        x = hadamard(y.unflatten(-1, (-1, self._block)), inverse=True)
        return (x.mul_(random_signs(self._block, x.device)) if self._flip else x).flatten(-2)

    def transposed(self, device: torch.device) -> Tensor:
        return _transposed_hadamard(self._head_dim, self._flip, self._block, device)


@cache
def _transposed_hadamard(head_dim: int, flip: bool, block: int, device: torch.device) -> Tensor:
    """The matrix of a `HadamardRotation`, sent to the device once, for all modes of autograd."""
    with torch.inference_mode(False), torch.no_grad():
        return HadamardRotation(head_dim, flip, block).ahead(torch.eye(head_dim, dtype=torch.float32)).to(device)


class MatrixRotation(ChannelRotation):
    """R of each kv head, calibrated. matrix: `[kv_heads, head_dim, head_dim]` float32. spread: root mean square of each
    channel before the rotation, `[kv_heads, head_dim]`: numbers above 128 times it are clamped. Both may have one entry
    for all heads."""

    def __init__(self, matrix: TensorLike, spread: TensorLike) -> None:
        self._shapes = spec_of(spread).shape, spec_of(matrix).shape
        if not isinstance(matrix, TensorSpec) and not isinstance(spread, TensorSpec):
            self._matrix, self._spread, self._product = matrix, spread, ExactProduct(spread, matrix)

    def ahead(self, x: Tensor) -> Tensor:
        return self._product(x.float())

    def queries(self, q: Tensor) -> Tensor:
        return q.float() @ self._matrix.mT

    def back(self, y: Tensor) -> Tensor:
        return y.float() @ self._matrix

    def transposed(self, device: torch.device) -> Tensor:
        return self._matrix.mT

    def constants(self) -> Mapping[str, Tensor]:
        tables = {"integers.gain": self._product.integers, **self._product.tables()}
        return {"rotation": self._matrix, "spread": self._spread, **tables}

    def layout(self) -> Mapping[str, TensorSpec]:
        spread, matrix = self._shapes
        integers, tables = product_layout(spread, matrix)
        given = {"rotation": TensorSpec(matrix, "float32"), "spread": TensorSpec(spread, "float32")}
        return {**given, "integers.gain": integers, **tables}


class RotatedCodec(WrappedCodec):
    """`base` encodes R x with an orthogonal matrix R of each head's channels; decoding applies R^T.

    A weighted sum of values is rotated back once, instead of each value. Parts are those of `base`.
    """

    #: Under another codec. As the codec of all heads it is read in rotated channels (`attention.rotated_channels`).
    unread_by_kernels = "channels are rotated before they are packed"
    rotation: ChannelRotation

    def __init__(self, base: Codec, rotation: ChannelRotation) -> None:
        super().__init__(base)
        self.rotation = rotation

    def constants(self) -> Mapping[str, Tensor]:
        return {**super().constants(), **{f"rotated.{k}": x for k, x in self.rotation.constants().items()}}

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        base = super().layout(heads, dim, dtype)
        rotation = {f"rotated.{name}": spec for name, spec in self.rotation.layout().items()}
        return replace(base, constants={**base.constants, **rotation})

    def _encode(self, x: Tensor) -> Packed:
        return self.base.encode(self.rotation.ahead(x))

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return self.rotation.back(self.base.decode(packed, torch.float32)).to(dtype)

    def products(self, queries: Tensor, packed: Packed) -> Tensor:
        """As `Codec.products`: q . (R^T y) = (R q) . y, so that queries are rotated instead of keys."""
        return self.base.products(self.rotation.queries(queries), packed)

    def weighted_sum(self, weights: Tensor, packed: Packed) -> Tensor:
        return self.rotation.back(self.base.weighted_sum(weights, packed))


@cache
def random_signs(width: int, device: torch.device) -> Tensor:
    """1 or -1 for each channel, float32 `[width]`, the same on all machines."""
    bits = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(0))
    return (2 * bits - 1).to(device, torch.float32)

"""The base of codecs that change numbers before another codec packs them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvq_cli.codecs.base import Codec, Packed
from kvq_cli.codecs.layout import Layout

if TYPE_CHECKING:
    from torch import Tensor


class WrappedCodec(Codec):
    """Pack changed numbers by `base`, whose blocks, parts and constants these are unless a subclass says otherwise."""

    #: Whether all kv heads of a token share a part, so that codecs of some of the heads give others.
    joins_heads: bool = False

    def __init__(self, base: Codec) -> None:
        self.base = base
        self.block_tokens, self.nominal_bits = base.block_tokens, base.nominal_bits
        self.kernel_tile = base.kernel_tile

    def constants(self) -> Mapping[str, Tensor]:
        return self.base.constants()

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        return self.base.layout(heads, dim, dtype)

    def check(self, packed: Packed) -> None:
        self.base.check(packed)

    @property
    def capturable(self) -> bool:
        return self.base.capturable


def joins_heads(codec: object) -> bool:
    """Return whether a codec, or one that it wraps, joins the kv heads of a token in a part."""
    return isinstance(codec, WrappedCodec) and (codec.joins_heads or joins_heads(codec.base))

"""Different codecs for different kv heads of one stream."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvq_cli.codecs.base import Codec, KernelStorage, KeyRotation, Packed, Part
from kvq_cli.codecs.layout import Layout, PartSpec, TensorSpec
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from kvq_cli.codecs.transform import TransformCodec


class PerHeadCodec(Codec):
    """members: name -> (codec, its kv heads); every head has exactly one codec. device: None where nothing is encoded.

    Parts and constants are named `<member>.<part>`; dimension 1 holds the member's heads only.
    """

    def __init__(self, members: Mapping[str, tuple[Codec, Sequence[int]]], device: torch.device | None) -> None:
        served = [head for _, heads in members.values() for head in heads]
        if sorted(served) != list(range(len(served))):
            raise ValueError(f"each kv head needs one codec, got heads {sorted(served)}")
        self._heads = len(served)
        #: name -> (codec, kv heads), as Python integers.
        self.members = {name: (codec, tuple(heads)) for name, (codec, heads) in members.items()}
        if device is not None:
            index = {name: torch.tensor(heads, device=device) for name, (_, heads) in members.items()}
            self._members = {name: (codec, index[name]) for name, (codec, _) in members.items()}
        self.block_tokens = math.lcm(*(codec.block_tokens for codec, _ in members.values()))
        self.kernel_tile = max(codec.kernel_tile for codec, _ in members.values())
        self.nominal_bits = sum(c.nominal_bits * len(heads) for c, heads in members.values()) / self._heads

    def constants(self) -> Mapping[str, Tensor]:
        return {f"{name}.{k}": t for name, (codec, _) in self._members.items() for k, t in codec.constants().items()}

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        parts: dict[str, PartSpec] = {}
        constants: dict[str, TensorSpec] = {}
        for name, (codec, served) in self.members.items():
            layout = codec.layout(len(served), dim, dtype)
            parts |= {f"{name}.{key}": part for key, part in layout.parts.items()}
            constants |= {f"{name}.{key}": spec for key, spec in layout.constants.items()}
        return Layout(parts, constants)

    @property
    def unread_by_kernels(self) -> str | None:
        return next(filter(None, (codec.unread_by_kernels for codec, _ in self.members.values())), None)

    @property
    def transforms(self) -> tuple[TransformCodec, ...]:
        found = [codec.transforms for codec, _ in self.members.values()]
        return sum(found, ()) if all(found) else ()

    def kernel_storage(self, parts: Mapping[str, Part], rotation: KeyRotation = None) -> KernelStorage:
        from kvq_kernels.decode_attention import PerHead

        members: Any = (
            codec.kernel_storage(_parts_of(parts, name), rotation) for name, (codec, _) in self.members.items()
        )
        return PerHead(tuple(members), tuple(heads for _, heads in self.members.values()))

    @property
    def capturable(self) -> bool:
        return all(codec.capturable for codec, _ in self.members.values())

    @property
    def ignoring_capturable(self) -> bool:
        return all(codec.ignoring_capturable for codec, _ in self.members.values())

    def _encode(self, x: Tensor) -> Packed:
        return self._joined(x.shape[2], lambda codec, heads: codec.encode(x.index_select(1, heads)))

    def encode_ignoring(self, x: Tensor, ignored: Tensor) -> Packed:
        def encode(codec: Codec, heads: Tensor) -> Packed:
            return codec.encode_ignoring(x.index_select(1, heads), ignored.index_select(1, heads))

        return self._joined(x.shape[2], encode)

    def _joined(self, tokens: int, encode: Callable[[Codec, Tensor], Packed]) -> Packed:
        parts: dict[str, Part] = {}
        for name, (codec, heads) in self._members.items():
            parts |= {f"{name}.{key}": part for key, part in encode(codec, heads).parts.items()}
        return Packed(tokens, parts)

    def check(self, packed: Packed) -> None:
        for name, (codec, _) in self.members.items():
            codec.check(_of_member(packed, name))

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        return self._by_head(packed, lambda codec, own, _: codec.decode(own, dtype))

    def decode_by_channel(self, packed: Packed) -> Tensor:
        return self._by_head(packed, lambda codec, own, _: codec.decode_by_channel(own))

    def products(self, queries: Tensor, packed: Packed) -> Tensor:
        return self._by_head(packed, lambda codec, own, heads: codec.products(queries.index_select(1, heads), own))

    def weighted_sum(self, weights: Tensor, packed: Packed) -> Tensor:
        return self._by_head(packed, lambda codec, own, heads: codec.weighted_sum(weights.index_select(1, heads), own))

    def _by_head(self, packed: Packed, computed: Callable[[Codec, Packed, Tensor], Tensor]) -> Tensor:
        """What is computed of each member's parts and heads, head by head along dimension 1."""
        found = [computed(codec, _of_member(packed, name), heads) for name, (codec, heads) in self._members.items()]
        out = found[0].new_empty(len(found[0]), self._heads, *found[0].shape[2:])
        for (_, heads), x in zip(self._members.values(), found, strict=True):
            out.index_copy_(1, heads, x)
        return out


def _parts_of(parts: Mapping[str, Part], name: str) -> dict[str, Part]:
    """The parts of one member, under its own names."""
    prefix = f"{name}."
    return {k.removeprefix(prefix): part for k, part in parts.items() if k.startswith(prefix)}


def _of_member(packed: Packed, name: str) -> Packed:
    return Packed(packed.tokens, _parts_of(packed.parts, name))

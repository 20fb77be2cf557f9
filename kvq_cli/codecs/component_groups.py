"""Codes of the components of a transform: groups of adjacent components share a number of bits, a scale and a zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from kvq_cli.codecs import bits as bitpack
from kvq_cli.codecs.base import Packed, Part, refuse_unless, side_dtype, to_side
from kvq_cli.codecs.layout import PartSpec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Sizes of groups in components: multiples of the first, so that codes of a group are whole 32-bit words.
SIZES = (16, 64, 256, 1024)
#: Bits of a group's codes; with 16, numbers are stored as they are, without scale and zero.
BITS = (2, 4, 8, 16)
EXACT = 16


class Group(NamedTuple):
    """Adjacent components that are coded together."""

    components: int
    bits: int

    @property
    def words(self) -> int:
        """32-bit words of a token's codes, with scale and zero in 16 bits each."""
        return self.components * self.bits // bitpack.WORD + (self.bits < EXACT)


class ComponentGroups:
    """Codes of the components that `groups` cover, in order; scale and zero are those of `UniformCodec`, of each token
    and group.

    Parts: `codes` int32 `[B, 1, T, words]`; `scale` and `zero` 16 bits `[B, 1, T, groups]`; `exact` 16 bits `[B, 1, T,
    components]` of groups with 16 bits. Those without an entry are left out.
    """

    def __init__(self, groups: Sequence[Group], dtype: torch.dtype | str) -> None:
        self.groups, self.dtype = tuple(groups), side_dtype(dtype)
        self.components = sum(group.components for group in groups)
        #: Runs of equal groups: (their form, how many).
        self._runs = [(group, len(list(run))) for group, run in groupby(self.groups)]
        self._codecs = {
            (group, count): UniformCodec(group.bits, "token", group.components, count * group.components, self.dtype)
            for group, count in self._runs
            if group.bits < EXACT
        }

    @property
    def nbytes(self) -> int:
        """Bytes of a token."""
        return 4 * sum(group.words for group in self.groups)

    def layout(self) -> Mapping[str, PartSpec]:
        """The parts."""
        coded = [group for group in self.groups if group.bits < EXACT]
        words = sum(group.words - 1 for group in coded)
        exact = sum(group.components for group in self.groups if group.bits == EXACT)
        sides = dict.fromkeys(("scale", "zero"), (len(coded), self.dtype))
        sizes = {"codes": (words, "int32"), **sides, "exact": (exact, self.dtype)}
        return {name: PartSpec(1, 1, (size,), dtype) for name, (size, dtype) in sizes.items() if size}

    def encode(self, z: Tensor) -> Packed:
        """Pack `z` `[B, 1, T, components]` float32."""
        found: dict[str, list[Tensor]] = {"codes": [], "scale": [], "zero": [], "exact": []}
        for run, numbers in zip(self._runs, z.split([g.components * n for g, n in self._runs], dim=3), strict=True):
            if (codec := self._codecs.get(run)) is None:
                found["exact"].append(to_side(numbers, self.dtype))
                continue
            codes, sides = codec.quantize(numbers)
            found["codes"].append(bitpack.pack(codes, codec.bits))
            for name, side in sides.items():
                found[name].append(side)
        return Packed(z.shape[2], {name: Part(torch.cat(pieces, dim=3), 1) for name, pieces in found.items() if pieces})

    def decode(self, packed: Packed) -> Tensor:
        """The components `[B, 1, T, components]`, float32."""
        at = dict.fromkeys(("codes", "scale", "zero", "exact"), 0)

        def take(name: str, count: int) -> Tensor:
            at[name] += count
            return packed.parts[name].tensor[..., at[name] - count : at[name]]

        pieces = []
        for group, count in self._runs:
            if (codec := self._codecs.get((group, count))) is None:
                pieces.append(take("exact", count * group.components).float())
                continue
            words = take("codes", count * (group.words - 1))
            codes = bitpack.unpack(words, codec.bits, codec.head_dim).float()
            pieces.append(codec.dequantize(codes, {name: take(name, count) for name in ("scale", "zero")}))
        return torch.cat(pieces, dim=3)

    def check(self, packed: Packed) -> None:
        """See `Codec.check`."""
        if "scale" in packed.parts:
            refuse_unless(packed.parts["scale"].tensor >= 0, "scale")

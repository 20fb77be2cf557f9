"""Packing of a transform's codes in the fields of `kvq_kernels.fields`, and unpacking by shifts of whole tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from kvq_kernels import fields

from kvq_cli.codecs.base import Part
from kvq_cli.codecs.layout import PartSpec, TensorSpec
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Dtype of the words of so many bits.
_WORDS = {32: "int32", 16: "int16", 8: "uint8"}


class FieldCodes:
    """Packs the codes of one profile. widths: bits of each field. values: the form of values, else that of keys.

    Parts: `codes16` to `codes1`, `[B, G, T, 4 lanes, words]` of keys, `[B, G, T / 16, 8 pairs of tokens, 8 lanes,
    words]` of values. device: None where nothing is packed.
    """

    def __init__(self, widths: Sequence[int], values: bool, device: torch.device | None) -> None:
        places = fields.places(tuple(widths))
        #: Bytes of a lane.
        self.rate = fields.rate(widths)
        self.parts = fields.parts(self.rate)
        self._values = values
        self.components = fields.FIELD * len(widths)
        #: Tokens that share a number of the parts.
        self.unit = fields.BLOCK if values else 1
        if device is not None:
            firsts = list(accumulate((part.words for part in self.parts), initial=0))
            self._words = firsts[-1]

            def table(numbers: list[int], dtype: torch.dtype) -> Tensor:
                return torch.tensor(numbers, dtype=dtype, device=device)

            first_bits = [place.shift + place.offset for place in places]
            # Of each field: its word among those of all parts, the largest code, first bits in both halves, and bits.
            self.word = table([firsts[place.part] + place.word for place in places], torch.int32)
            self.largest = table([2**width - 1 for width in widths], torch.int16).view(-1, 1)
            self.shift = table(first_bits, torch.int16).view(-1, 1)
            rooms = [self.parts[place.part].room for place in places]
            self.high = table([bit + room for bit, room in zip(first_bits, rooms, strict=True)], torch.int32)
            self._mask = (self.largest << self.shift).unsqueeze(2)

    def layout(self, groups: int) -> dict[str, PartSpec]:
        """The parts of so many groups of channels."""
        lanes = (8, fields.VALUE_LANES) if self._values else (fields.KEY_LANES,)
        return {part.name: PartSpec(groups, self.unit, (*lanes, part.words), _WORDS[part.bits]) for part in self.parts}

    def tables(self) -> Mapping[str, Tensor]:
        """Tensors held, by names of `base.TABLES`."""
        named = {"word": self.word, "largest": self.largest, "shift": self.shift, "high": self.high, "mask": self._mask}
        return {f"{name}.offset": table for name, table in named.items()}

    def table_layout(self) -> dict[str, TensorSpec]:
        """Shapes and dtypes of `tables`."""
        count = self.components // fields.FIELD
        shapes = {"word": (count,), "largest": (count, 1), "shift": (count, 1), "high": (count,), "mask": (count, 1, 1)}
        kinds = {"word": "int32", "high": "int32"}
        return {f"{name}.offset": TensorSpec(shape, kinds.get(name, "int16")) for name, shape in shapes.items()}

    @property
    def first_bits(self) -> Tensor:
        """Of each component, the bit at which its codes begin in half a word, int16 `[components]`."""
        return self.shift.repeat_interleave(fields.FIELD)

    def pack(self, numbers: Tensor) -> dict[str, Part]:
        """Numbers `[B, G, T, components]`, changed to the nearest codes of their fields, as parts."""
        codes = numbers.round_().clamp_(0, 2**fields.MAX_WIDTH - 1).short().unflatten(3, (-1, fields.FIELD))
        shifted = torch.minimum(codes, self.largest).int() << self.shift
        rooms = shifted.new_zeros(*codes.shape[:3], self._words, fields.FIELD)
        rooms.index_add_(3, self.word, shifted)  # bits are disjoint: their sum is their union
        # Both halves of each word, and the words of a lane side by side.
        if self._values:
            low, high = rooms.unflatten(2, (-1, 8, 2)).transpose(5, 6).unbind(4)
        else:
            low, high = rooms.unflatten(4, (-1, 2)).transpose(3, 4).unbind(5)
        sizes, packed = [part.words for part in self.parts], {}
        for part, *halves in zip(self.parts, low.split(sizes, dim=-1), high.split(sizes, dim=-1), strict=True):
            words = torch.empty(halves[0].shape, dtype=getattr(torch, _WORDS[part.bits]), device=numbers.device)
            packed[part.name] = Part(words.copy_(halves[0] | halves[1] << part.room), self.unit)
        return packed

    def unpack(self, parts: Mapping[str, Part]) -> Tensor:
        """Codes where they stand in half a word, times 2^`first_bits`: uint16 `[B, G, components, T]`."""
        planes = [self._planes(part, parts[part.name].tensor) for part in self.parts]
        words = planes[0] if len(planes) == 1 else torch.cat(planes, dim=2)
        return words.index_select(2, self.word).bitwise_and_(self._mask).flatten(2, 3).view(torch.uint16)

    def _planes(self, part: fields.Part, words: Tensor) -> Tensor:
        """The halves of a part's words, int16 `[B, G, words, 8 components, T]`."""
        if self._values:  # [.., blocks, 8 pairs of tokens, 8 lanes, words]: tokens side by side
            by_lane = words.flatten(2, 3).permute(0, 1, 4, 3, 2).contiguous()
            return self._halves(part, by_lane).flatten(4)
        halves = self._halves(part, words)  # [.., T, 4 lanes, words, 2 components]
        return halves.permute(0, 1, 4, 3, 5, 2).flatten(3, 4).contiguous()

    @staticmethod
    def _halves(part: fields.Part, words: Tensor) -> Tensor:
        """The low and the high halves of words, int16 `[..., 2]`."""
        if part.room == 4:
            return torch.stack([words & 15, words >> 4], dim=-1).short()
        return words.view(torch.int16 if part.room == 16 else torch.uint8).unflatten(-1, (-1, 2)).short()

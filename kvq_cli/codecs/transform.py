"""Karhunen-Loeve transform codes: channels are transformed, and components kept as integers of 1 to 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

from kvq_kernels import fields

from kvq_cli.codecs import kernels
from kvq_cli.codecs.base import Codec, KernelStorage, KeyRotation, Packed, Part
from kvq_cli.codecs.exact_product import ExactProduct, product_layout
from kvq_cli.codecs.field_codes import FieldCodes
from kvq_cli.codecs.gain import Gain, gain_of
from kvq_cli.codecs.layout import Layout, PartSpec, TensorLike, TensorSpec
from kvq_cli.codecs.per_head import PerHeadCodec
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from kvq_kernels.decode_attention import Transform
    from kvq_kernels.transform_pack import PackTables
    from torch import Tensor


class TransformCodec(Codec):
    """u = A (x - mean); codes c = round(u / g + center), clamped to the component's bits; x' = g S (c - center) + mean.

    g is the token's `Gain`. A group of channels has one transform: the head_dim channels of a head, or those of all kv
    heads together. Components come in fields of 8 with the same bits, the same for all groups; groups of different
    widths have a codec each (`transform_codec`). With G groups of W channels and K components, the tensors are:

    widths:    uint8 `[G, K / 8]`, bits of each field, descending, 0: not stored; see `kvq_kernels.fields`.
    mean, std: `[G, W]`, mean and deviation of each channel.
    analysis:  A, `[G, K, W]`, in steps; synthesis: S, `[G, W, K]`, times the step.
    center:    `[G, K]`, the code of 0, as a rule (2^bits - 1) / 2.
    deviation: `[G, K]`, that of u; absent: there is no gain, g = 1.

    u is an `ExactProduct`: a token gets the same codes alone as among others.

    Parts: those of `FieldCodes`, and `gain` uint8 `[B, G, T]`.
    """

    unread_by_kernels = "codes stand for components of a transform"
    kernel_tile = 64  # of four warps

    def __init__(self, heads: int, tensors: Mapping[str, TensorLike], values: bool) -> None:
        groups, width = tensors["mean"].shape
        (self.widths,) = {tuple(filter(None, row)) for row in tensors["widths"].tolist()}
        self._groups, self._heads, self._per_group = groups, heads, heads // groups
        self.head_dim = width // self._per_group
        self.has_gain = "deviation" in tensors
        planned = isinstance(tensors["mean"], TensorSpec)
        device = None if planned else cast("Tensor", tensors["mean"]).device
        self._fields, self._values = FieldCodes(self.widths, values, device), values
        self.block_tokens = fields.BLOCK  # kernels read the tokens of both streams in blocks
        nbytes = sum(part.nbytes(self.block_tokens) for part in self._part_layout().values())
        self.nominal_bits = 8 * nbytes / (self.block_tokens * groups * width)
        if not planned:
            self._make_tables(cast("Mapping[str, Tensor]", tensors))

    def _make_tables(self, tensors: Mapping[str, Tensor]) -> None:
        kept = slice(self._fields.components)
        self._mean, self._center = tensors["mean"].float(), tensors["center"][:, kept].float().contiguous()
        mean, synthesis = self._mean.unsqueeze(2), tensors["synthesis"][:, :, kept].float()
        origin = synthesis @ self._center.unsqueeze(2)
        synthesis = torch.ldexp(synthesis, -self._fields.first_bits)
        # x' = g S c - g S center + mean as one product.
        columns = (synthesis, -origin, mean) if self.has_gain else (synthesis, mean - origin)
        self._affine = torch.cat(columns, dim=2)
        self._product = ExactProduct(tensors["std"].float(), tensors["analysis"][:, kept].float())
        self._gain = Gain(tensors["deviation"][:, kept].float()) if self.has_gain else None
        self._kernel_transforms: dict[KeyRotation, Transform] = {}
        self._pack_tables: PackTables | None = None

    @property
    def synthesis(self) -> Tensor:
        """S, `[G, W, K]` float32."""
        return torch.ldexp(self._affine[:, :, : self._fields.components], self._fields.first_bits)

    @property
    def transforms(self) -> tuple[TransformCodec, ...]:
        return (self,)

    def kernel_transform(self, rotation: KeyRotation) -> Transform:
        """The constants as `transform_attention` takes them, made once. rotation: of keys."""
        from kvq_kernels.decode_attention import Transform

        if rotation not in self._kernel_transforms:
            constants = self.widths, self.synthesis, self._mean, self._center, self.head_dim
            made = Transform.of_values(*constants) if self._values else Transform.of_keys(*constants, rotation)
            self._kernel_transforms[rotation] = made
        return self._kernel_transforms[rotation]

    def kernel_storage(self, parts: Mapping[str, Part], rotation: KeyRotation = None) -> KernelStorage:
        from kvq_kernels.decode_attention import Transformed

        codes, gain = tuple(parts[part.name].tensor for part in self._fields.parts), parts.get("gain")
        return Transformed(codes, None if gain is None else gain.tensor, self.kernel_transform(rotation))

    @property
    def joined(self) -> bool:
        """Whether a transform serves more than one kv head."""
        return self._per_group > 1

    def _part_layout(self) -> dict[str, PartSpec]:
        gain = {"gain": PartSpec(self._groups, 1, (), "uint8")} if self.has_gain else {}
        return self._fields.layout(self._groups) | gain

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        groups, width = self._groups, self._per_group * self.head_dim
        components = self._fields.components
        integers, tables = product_layout((groups, width), (groups, components, width))
        constants = {
            "mean": TensorSpec((groups, width), "float32"),
            "center": TensorSpec((groups, components), "float32"),
        }
        constants["synthesis"] = TensorSpec((groups, width, components + 1 + self.has_gain), "float32")
        constants |= {"analysis": integers, **tables, **self._fields.table_layout()}
        if self.has_gain:
            constants["deviation.scale"] = TensorSpec((groups, 1, components), "float32")
        return Layout(self._part_layout(), constants)

    def constants(self) -> Mapping[str, Tensor]:
        named = {"mean": self._mean, "center": self._center, "synthesis": self._affine}
        named |= {"analysis": self._product.integers, **self._product.tables(), **self._fields.tables()}
        return named if self._gain is None else named | {"deviation.scale": self._gain.scale}

    def components(self, x: Tensor) -> Tensor:
        """u of `x` `[B, H, T, D]`: `[B, G, T, K]` float32, the same for a token alone and among others."""
        x = x.float().unflatten(1, (self._groups, self._per_group)).transpose(2, 3).flatten(3)  # [B, G, T, W]
        return self._product(x - self._mean.unsqueeze(1))

    def _encode(self, x: Tensor) -> Packed:
        if not self.joined and (packed := kernels.transform_pack(x, self.pack_tables)) is not None:
            codes, gains = packed
            found = {
                part.name: Part(own, self._fields.unit) for part, own in zip(self._fields.parts, codes, strict=True)
            }
            return Packed(x.shape[2], found if gains is None else found | {"gain": Part(gains, 1)})
        u, parts = self.components(x), dict[str, Part]()
        if self._gain is not None:
            index = self._gain.index(u)
            u /= gain_of(index).unsqueeze(3)
            parts["gain"] = Part(index, 1)
        return Packed(x.shape[2], parts | self._fields.pack(u.add_(self._center.unsqueeze(1))))

    def pack_tables(self) -> PackTables:
        """The constants as `transform_pack` takes them, made once."""
        from kvq_kernels.transform_pack import PackTables

        if self._pack_tables is None:
            own, product, gain = self._fields, self._product, self._gain
            self._pack_tables = PackTables(
                self._mean,
                product.to_grid.squeeze(1),
                product.integers,
                product.step,
                self._center,
                own.largest.squeeze(1),
                own.word,
                own.shift.squeeze(1),
                own.high,
                product.limit,
                self._values,
                own.rate,
                None if gain is None else gain.tables(),
            )
        return self._pack_tables

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        x = self._numbers(packed).mT @ self._affine.mT  # [B, G, T, W]
        return x.unflatten(3, (self._per_group, -1)).transpose(2, 3).flatten(1, 2).to(dtype).contiguous()

    def decode_by_channel(self, packed: Packed) -> Tensor:
        x = self._affine @ self._numbers(packed)  # [B, G, W, T]
        return x.view(len(x), self._heads, self.head_dim, -1)

    # The transform is applied to queries and to sums of codes, not to each token.

    def products(self, queries: Tensor, packed: Packed) -> Tensor:
        turned = self._by_group(queries @ self._affine_by_head)
        return (turned @ self._numbers(packed)).view(*queries.shape[:3], -1)

    def weighted_sum(self, weights: Tensor, packed: Packed) -> Tensor:
        own = self._by_group(weights)
        if self.has_gain:
            own = own * self._gains(packed)
        columns = [own @ self._fields.unpack(packed.parts).float().mT, own.sum(dim=3, keepdim=True)]
        if self.has_gain:
            columns.append(weights.sum(dim=3, keepdim=True))
        sums = torch.cat([each.view(*weights.shape[:3], -1) for each in columns], dim=3)
        return sums @ self._affine_by_head.mT

    def _numbers(self, packed: Packed) -> Tensor:
        """g c, g and 1 of each token, which `_affine` turns into x': float32 `[B, G, K + 2, T]`; c, 1 without gains."""
        codes = self._fields.unpack(packed.parts)
        batch, groups, components, tokens = codes.shape
        numbers = self._mean.new_empty(batch, groups, self._affine.shape[2], tokens)
        numbers[:, :, :components] = codes
        numbers[:, :, components:].fill_(1)
        if self.has_gain:
            numbers[:, :, :-1].mul_(self._gains(packed))
        return numbers

    def _gains(self, packed: Packed) -> Tensor:
        """g, float32 `[B, G, 1, T]`."""
        return gain_of(packed.parts["gain"].tensor).unsqueeze(2)

    @property
    def _affine_by_head(self) -> Tensor:
        """`[H, D, K + 2]`; of a common transform, its rows of the head."""
        return self._affine.view(self._heads, self.head_dim, -1)

    def _by_group(self, x: Tensor) -> Tensor:
        """`[B, H, queries, N]` -> `[B, G, queries of all heads of a group, N]`."""
        return x.unflatten(1, (self._groups, self._per_group)).flatten(2, 3)


def transform_codec(
    heads: int, tensors: Mapping[str, TensorLike], values: bool, lists: Sequence[Sequence[int]] | None = None
) -> TransformCodec | PerHeadCodec:
    """The codec of a stream: a member for each list of heads with the same widths. lists: of heads, each with the same
    widths; None: by the stream's own."""
    if tensors["mean"].shape[0] < heads:  # one transform for all heads
        return TransformCodec(heads, tensors, values)
    lists = lists or same_widths(tensors)
    if len(lists) == 1:
        return TransformCodec(heads, tensors, values)
    members = {
        str(index): (TransformCodec(len(own), {name: x[list(own)] for name, x in tensors.items()}, values), own)
        for index, own in enumerate(lists)
    }
    return PerHeadCodec(members, getattr(tensors["mean"], "device", None))


def same_widths(*streams: Mapping[str, TensorLike]) -> list[list[int]]:
    """Lists of the groups whose fields have the same widths, in each of the streams."""
    found: dict[str, list[int]] = {}
    for group, rows in enumerate(zip(*(tensors["widths"].tolist() for tensors in streams), strict=True)):
        found.setdefault(str(rows), []).append(group)
    return list(found.values())

"""Asymmetric uniform quantization in groups: KIVI's keys (per channel) and values (per token)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from kvq_cli.codecs import bits as bitpack
from kvq_cli.codecs import kernels
from kvq_cli.codecs.base import Codec, KernelStorage, KeyRotation, Packed, Part, refuse_unless, side_dtype, to_side
from kvq_cli.codecs.layout import Layout, PartSpec
from kvq_cli.errors import UsageError
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: A group is adjacent tokens of one channel ("channel") or adjacent channels of one token ("token").
Axis = Literal["channel", "token"]


class UniformCodec(Codec):
    """q = clip(round((x - z) / s), 0, 2^b - 1), x' = q s + z, with z = min and s = (max - min) / (2^b - 1) of a group.

    axis "channel": a group is `group` adjacent tokens of one channel (`block_tokens` = group).
    axis "token":   a group is `group` adjacent channels of one token (`block_tokens` = 1).

    Scale and zero are stored in 16 bits (or the zero in `zero_dtype`), at most the largest number of that dtype, and
    codes are computed with the rounded values. A constant group has s = 0 and x' = z.

    Parts: `codes` int32 `[B, H, T, words]`, planar (see `bits`), unit 1; `scale` and `zero` `[B, H, T / group, D]` with
    unit `group` (axis "channel") or `[B, H, T, D / group]` with unit 1 (axis "token").
    """

    unread_by_kernels: str | None = None
    read_as_latents = "kv"

    def __init__(
        self,
        bits: int,
        axis: Axis,
        group: int,
        head_dim: int,
        dtype: torch.dtype | str = "float16",
        zero_dtype: str | None = None,
    ) -> None:
        if bits not in bitpack.SPLIT:
            raise UsageError(f"bits={bits}: a uniform quantizer packs 1, 2, 3, 4 or 8 bits")
        if axis == "token" and head_dim % group:
            fitting = ", ".join(str(g) for g in range(4, head_dim + 1) if head_dim % g == 0)
            raise UsageError(f"group={group} does not divide head_dim={head_dim}; groups that do: {fitting}")
        self.bits, self.axis, self.group, self.head_dim = bits, axis, group, head_dim
        self.nominal_bits = float(bits)
        self.block_tokens = group if axis == "channel" else 1
        self.dtype = side_dtype(dtype)
        self.zero_dtype = zero_dtype or self.dtype
        self._unit = self.block_tokens
        self.group_dim = 3 if axis == "channel" else 4

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        codes = PartSpec(heads, 1, (bitpack.words_per_row(self.bits, dim),), "int32")
        return Layout({"codes": codes} | {name: self._side_spec(heads, dim, kind) for name, kind in self.sides.items()})

    @property
    def sides(self) -> dict[str, str]:
        """Names and dtypes of the parts that groups have."""
        return {"scale": self.dtype, "zero": self.zero_dtype}

    def kernel_storage(self, parts: Mapping[str, Part], rotation: KeyRotation = None) -> KernelStorage:
        from kvq_kernels.decode_attention import Uniform

        codes, scale, zero = (parts[name].tensor for name in ("codes", "scale", "zero"))
        return Uniform(codes, scale, self.bits, self.axis, self.group, zero)

    def _side_spec(self, heads: int, dim: int, dtype: str) -> PartSpec:
        return PartSpec(heads, self._unit, (dim if self.axis == "channel" else dim // self.group,), dtype)

    def _encode(self, x: Tensor) -> Packed:
        if (packed := self._encode_on_gpu(x)) is not None:
            words, sides = packed
        else:
            codes, sides = self.quantize(x)
            words = bitpack.pack(codes, self.bits)
        parts = {"codes": Part(words, 1)}
        return Packed(x.shape[2], parts | {name: Part(side, self._unit) for name, side in sides.items()})

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        codes = bitpack.unpack(packed.parts["codes"].tensor, self.bits, self.head_dim).float()
        sides = {name: part.tensor for name, part in packed.parts.items() if name != "codes"}
        return self.dequantize(codes, sides).to(dtype)

    def check(self, packed: Packed) -> None:
        refuse_unless(packed.parts["scale"].tensor >= 0, "scale")

    def _encode_on_gpu(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]] | None:
        """The words and the parts of groups that `_encode` packs, by the kernel. None where there is no kernel: on a
        CPU, and for subclasses that quantize in another way."""
        if type(self) is not UniformCodec or (packed := kernels.quantize_pack(x, **self._kernel_options())) is None:
            return None
        if packed.zero is None:
            raise ValueError("the kernel packed asymmetric groups without zero-points")
        return packed.codes, {"scale": packed.scale, "zero": packed.zero}

    def _kernel_options(self) -> dict[str, Any]:
        sizes = {"bits": self.bits, "axis": self.axis, "group": self.group, "dim": self.head_dim}
        return sizes | {"scale_dtype": getattr(torch, self.dtype), "zero_dtype": getattr(torch, self.zero_dtype)}

    def quantize(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """`[B, H, T, C]` of whole groups -> (codes uint8 of that shape, the parts that groups have)."""
        groups = self.grouped(x).float()
        # Minus zero becomes zero: which of the two a minimum finds depends on the device.
        low, high = (side + 0.0 for side in groups.aminmax(dim=self.group_dim, keepdim=True))
        zero = to_side(low, self.zero_dtype)
        scale = to_side((high - low) / (2**self.bits - 1), self.dtype)
        codes = self._steps(groups - zero.float(), scale, 0, 2**self.bits - 1).to(torch.uint8).view(x.shape)
        return codes, {"scale": scale.squeeze(self.group_dim), "zero": zero.squeeze(self.group_dim)}

    def dequantize(self, codes: Tensor, sides: Mapping[str, Tensor]) -> Tensor:
        """x', float32, of the codes and parts that `quantize` gave; the codes as float32, which are overwritten."""
        x = self.grouped(codes)
        x.mul_(self._side(sides["scale"])).add_(self._side(sides["zero"]))
        return codes

    def _steps(self, distances: Tensor, scale: Tensor, least: int, most: int) -> Tensor:
        """Distances in steps of the scale as whole numbers in [least, most], in place; 0 where the scale is 0."""
        divisor = scale.float().masked_fill_(scale == 0, torch.inf)
        return distances.div_(divisor).round_().clamp_(least, most)

    def grouped(self, x: Tensor) -> Tensor:
        """A view of `[B, H, T, C]` with the numbers of a group along `group_dim`."""
        if self.axis == "channel":
            return x.unflatten(2, (-1, self.group))  # [B, H, T / group, group, C]
        return x.unflatten(3, (-1, self.group))  # [B, H, T, C / group, group]

    def _side(self, tensor: Tensor) -> Tensor:
        """A groups' part as float32 beside `grouped`."""
        return tensor.float().unsqueeze(self.group_dim)

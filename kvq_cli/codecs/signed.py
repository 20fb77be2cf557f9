"""Symmetric uniform quantization, or a choice of symmetric and asymmetric per group (InnerQ's hybrid)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Literal

from kvq_cli.codecs import kernels
from kvq_cli.codecs.base import KernelStorage, KeyRotation, Packed, Part, refuse_unless, side_dtype, to_side
from kvq_cli.codecs.uniform import Axis, UniformCodec
from kvq_cli.errors import UsageError
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

Sign = Literal["extra", "inside"]
Hybrid = Literal["no", "symmetric", "always"]

#: One word per group holds either its sign bits or its zero-point: group -> (the word, the zero-point in it).
WORDS = {16: ("int16", None), 32: ("int32", "float32"), 64: ("int64", "float64")}


def zero_type(group: int, dtype: torch.dtype | str) -> str:
    """The name of the type of a zero-point that fills a group's word of sign bits: 16 bits for a group of 16."""
    if group not in WORDS:
        raise UsageError(f"group={group}: sign bits of a group fill one word; use one of {', '.join(map(str, WORDS))}")
    name = WORDS[group][1]
    return name or side_dtype(dtype)


class SignedCodec(UniformCodec):
    """x' = sign(x) q s with q = clip(round(|x| / s), 0, L) and s = max|x| / L of a group.

    sign "extra":  L = 2^b - 1; b bits are the magnitude's, sign bits are kept apart, one word of `group` bits a group.
    sign "inside": L = 2^(b-1) - 1; one of the b bits is the sign: the codes are sign(x) q + L.
    hybrid:        "always": each group is symmetric or asymmetric (as in `UniformCodec`), whichever has the lower
                   squared error; a negative scale marks asymmetric groups. "symmetric": all groups are symmetric,
                   in the parts of a hybrid. "no": symmetric groups, in parts without zero-points. A hybrid needs the
                   words of sign bits for its zero-points.

    Parts beside `codes` and `scale`, shaped as the scale: with sign "extra" `sign`, int words; in a hybrid
    `sign_or_zero`, the same words with the zero-points of asymmetric groups in place.
    """

    read_as_latents = ""

    def __init__(
        self,
        bits: int,
        axis: Axis,
        group: int,
        head_dim: int,
        dtype: torch.dtype | str = "float16",
        sign: Sign = "extra",
        hybrid: Hybrid = "no",
    ) -> None:
        if sign == "inside" and bits == 1:
            raise UsageError("bits=1 leaves no bit for the magnitude with sign=inside; use 2 bits or sign=extra")
        if sign == "inside" and hybrid != "no":
            raise UsageError("a hybrid keeps zero-points in the words of sign bits; use sign=extra")
        self.sign, self.hybrid = sign, hybrid
        super().__init__(bits, axis, group, head_dim, dtype, zero_type(group, dtype) if sign == "extra" else None)
        self._largest = 2**bits - 1 if sign == "extra" else 2 ** (bits - 1) - 1
        if hybrid != "no" and group != 32:
            self.unread_by_kernels = f"zero-points are in words of {group} bits, not 32 (use group=32)"

    @property
    def sides(self) -> dict[str, str]:
        words = (
            {"sign" if self.hybrid == "no" else "sign_or_zero": WORDS[self.group][0]} if self.sign == "extra" else {}
        )
        return {"scale": self.dtype} | words

    def kernel_storage(self, parts: Mapping[str, Part], rotation: KeyRotation = None) -> KernelStorage:
        from kvq_kernels.decode_attention import Uniform

        codes, scale, *signs = (parts[name].tensor for name in ("codes", *self.sides))
        level, layout = 0 if signs else self._largest, (self.bits, self.axis, self.group)
        return Uniform(codes, scale, *layout, None, level, signs[0] if signs else None, self.hybrid != "no")

    def check(self, packed: Packed) -> None:
        if self.hybrid == "no":
            super().check(packed)
            return
        asymmetric = packed.parts["scale"].tensor.signbit()
        zero = packed.parts["sign_or_zero"].tensor.contiguous().view(self._zero_type)
        refuse_unless(zero.isfinite() | ~asymmetric, "sign_or_zero")

    @property
    def _zero_type(self) -> torch.dtype:
        return getattr(torch, self.zero_dtype)

    def _encode_on_gpu(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]] | None:
        mode = "hybrid" if self.hybrid == "always" else "symmetric"
        packed = kernels.quantize_pack(x, mode=mode, sign=self.sign, **self._kernel_options())
        if packed is None:
            return None
        words = {} if packed.sign is None else {"sign" if self.hybrid == "no" else "sign_or_zero": packed.sign}
        return packed.codes, {"scale": packed.scale} | words

    def quantize(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        codes, sides = self._symmetric(x)
        if self.hybrid == "no":
            return codes, sides
        if self.hybrid == "symmetric":
            return codes, {"scale": sides["scale"], "sign_or_zero": sides["sign"]}
        other_codes, other = super().quantize(x)
        error = self._error(x, self._restore_symmetric(codes, sides))
        asymmetric = self._error(x, super().dequantize(other_codes.float(), other)) < error
        scale = torch.where(asymmetric, other["scale"].neg(), sides["scale"])
        words = torch.where(asymmetric, other["zero"].view(sides["sign"].dtype), sides["sign"])
        each = asymmetric.unsqueeze(self.group_dim)
        codes = torch.where(each, self.grouped(other_codes), self.grouped(codes)).view(x.shape)
        return codes, {"scale": scale, "sign_or_zero": words}

    def dequantize(self, codes: Tensor, sides: Mapping[str, Tensor]) -> Tensor:
        if self.hybrid == "no":
            return self._restore_symmetric(codes, sides)
        asymmetric, scale = sides["scale"].signbit(), sides["scale"].abs()
        word = sides["sign_or_zero"]
        zero = word.view(self._zero_type).float().masked_fill(~asymmetric, 0)
        return self._signed(super().dequantize(codes, {"scale": scale, "zero": zero}), word.masked_fill(asymmetric, 0))

    def _symmetric(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        groups = self.grouped(x).float()
        scale = to_side(groups.abs().amax(dim=self.group_dim, keepdim=True) / self._largest, self.dtype)
        sides = {"scale": scale.squeeze(self.group_dim)}
        if self.sign == "inside":
            codes = self._steps(groups.clone(), scale, -self._largest, self._largest).add_(self._largest)
        else:
            codes, word = self._steps(groups.abs(), scale, 0, self._largest), getattr(torch, WORDS[self.group][0])
            places = torch.arange(self.group, dtype=word, device=x.device)
            bits = groups.signbit().to(word) << (places.unsqueeze(1) if self.axis == "channel" else places)
            sides["sign"] = bits.sum(dim=self.group_dim, dtype=word)  # the bits are disjoint: no sum overflows
        return codes.to(torch.uint8).view(x.shape), sides

    def _restore_symmetric(self, codes: Tensor, sides: Mapping[str, Tensor]) -> Tensor:
        x = codes.float()
        self.grouped(x).sub_(0 if self.sign == "extra" else self._largest).mul_(self._side(sides["scale"]))
        return self._signed(x, sides["sign"]) if self.sign == "extra" else x

    def _signed(self, x: Tensor, word: Tensor) -> Tensor:
        """`x`, negated in place where the number's bit in its group's word is set."""
        octets = word.contiguous().view(torch.uint8)
        if self.axis == "token":  # a byte has the signs of 8 neighbours
            signs = _octet_signs(x.device).index_select(0, octets.view(-1).int())
            return x.mul_(signs.view(x.shape))
        octets = octets.unflatten(3, (word.shape[3], -1)).transpose(3, 4).contiguous()  # [B, H, T / group, bytes, D]
        places = torch.arange(8, dtype=torch.uint8, device=x.device).unsqueeze(1)
        # Bytes are a quarter of the work of words: bits to signs 1 and -1 before they become floating point.
        signs = (octets.unsqueeze(self.group_dim + 1) >> places).bitwise_and_(1).view(torch.int8).mul_(-2).add_(1)
        return x.mul_(signs.view(x.shape).float())

    def _error(self, x: Tensor, restored: Tensor) -> Tensor:
        """Squared error of each group, added by neighbours: an order that every device can keep to."""
        squares, dim = self.grouped(restored - x.float()).square_(), self.group_dim
        while (count := squares.shape[dim]) > 1:
            pairs = squares.narrow(dim, 0, count - count % 2).unflatten(dim, (-1, 2))
            sums = pairs.select(dim + 1, 0) + pairs.select(dim + 1, 1)
            squares = torch.cat([sums, squares.narrow(dim, count - 1, 1)], dim=dim) if count % 2 else sums
        return squares.squeeze(dim)


@cache
def _octet_signs(device: torch.device) -> Tensor:
    """`[256, 8]` float32: of each byte, -1 where a bit is set, lowest first, else 1."""
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device)
    return 1 - 2 * (bits & 1).float()

"""KV cache formats of other engines: llama.cpp's blocks `q4_0` and `q8_0`, vLLM's int4 and fp8 per token and head,
transformers' quanto.

Numbers and bytes are those of the engines; codes lie in kvq's planar words (see `bits`), not in the engines' order.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import TYPE_CHECKING

from kvq_cli.codecs import bits as bitpack
from kvq_cli.codecs.base import Codec, Packed, Part, refuse_unless, to_side
from kvq_cli.codecs.layout import Layout, PartSpec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

#: Numbers of a block of llama.cpp; fewer, the largest divisor, where it does not divide head_dim, which llama.cpp
#: refuses.
BLOCK = 32
#: The least scale of vLLM's formats, and the greatest number of float8 e4m3.
_LEAST_SCALE, _FP8_MAX = 1e-6, 448.0
#: float32 words without the four lowest bits, which hold int4's zero-point.
_SCALE_BITS = -16


class _ServedFormat(Codec):
    """Codes and one number per group of adjacent channels of a token.

    Parts: `codes` int32 `[B, H, T, words]`, planar; `scale` `[B, H, T, head_dim / group]` of `scale_dtype`. Unit 1.
    """

    block_tokens = 1
    bits: int
    scale_dtype: str

    def __init__(self, head_dim: int, group: int) -> None:
        self.head_dim, self._group, self.nominal_bits = head_dim, group, float(self.bits)

    def layout(self, heads: int, dim: int, dtype: str) -> Layout:
        codes = PartSpec(heads, 1, (bitpack.words_per_row(self.bits, dim),), "int32")
        return Layout({"codes": codes, "scale": PartSpec(heads, 1, (dim // self._group,), self.scale_dtype)})

    def _encode(self, x: Tensor) -> Packed:
        codes, scale = self._quantize(x.float().unflatten(3, (-1, self._group)))
        words = bitpack.pack(codes.flatten(3), self.bits)
        return Packed(x.shape[2], {"codes": Part(words, 1), "scale": Part(scale.squeeze(4), 1)})

    def decode(self, packed: Packed, dtype: torch.dtype) -> Tensor:
        codes = bitpack.unpack(packed.parts["codes"].tensor, self.bits, self.head_dim)
        scale = packed.parts["scale"].tensor.unsqueeze(4)
        return self._dequantize(codes.unflatten(3, (-1, self._group)), scale).flatten(3).to(dtype)

    @abstractmethod
    def _quantize(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        """Return codes of groups `[B, H, T, G, group]` float32, and their scales `[B, H, T, G, 1]` as they are
        stored."""

    @abstractmethod
    def _dequantize(self, codes: Tensor, scale: Tensor) -> Tensor:
        """Return the inverse of `_quantize`, float32; codes uint8."""


class Q4_0(_ServedFormat):
    """x' = (q - 8) d with d = m / -8, m the number of the largest magnitude of a block of 32 with its sign, the first
    of equals, and q = min(15, floor(x / d + 8.5)): d in float16, q of the d that is not rounded. 4.5 bits per number.
    """

    bits, scale_dtype = 4, "float16"

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim, math.gcd(BLOCK, head_dim))

    def _quantize(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        scale = groups.gather(4, groups.abs().argmax(dim=4, keepdim=True)) / -8
        codes = (groups * _reciprocal(scale)).add_(8.5).floor_().clamp_(0, 15)
        return codes.to(torch.uint8), to_side(scale, self.scale_dtype)

    def _dequantize(self, codes: Tensor, scale: Tensor) -> Tensor:
        return (codes.float() - 8) * scale.float()


class Q8_0(_ServedFormat):
    """x' = q d with d = max|x| / 127 of a block of 32 and q = round(x / d), halves away from zero: d in float16, q of
    the d that is not rounded. 8.5 bits per number. q + 128 is packed."""

    bits, scale_dtype = 8, "float16"

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim, math.gcd(BLOCK, head_dim))

    def check(self, packed: Packed) -> None:
        refuse_unless(packed.parts["scale"].tensor >= 0, "scale")

    def _quantize(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        scale = groups.abs().amax(dim=4, keepdim=True) / 127
        codes = _rounded(groups * _reciprocal(scale)).add_(128)
        return codes.to(torch.uint8), to_side(scale, self.scale_dtype)

    def _dequantize(self, codes: Tensor, scale: Tensor) -> Tensor:
        return (codes.float() - 128) * scale.float()


class Int4PerTokenHead(_ServedFormat):
    """x' = (q - z) s of the head_dim numbers of a token, with s = max((max x - min x) / 15, 1e-6), z = round(-min x /
    s) and q = round(x / s + z), both in [0, 15], halves away from zero. s is a float32 whose four lowest bits are z; q
    and z are of the s before. 32 bits per token and head beside the codes: 4.25 bits per number at head_dim 128.
    """

    bits, scale_dtype = 4, "float32"

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim, head_dim)

    def check(self, packed: Packed) -> None:
        refuse_unless(packed.parts["scale"].tensor >= 0, "scale")

    def _quantize(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        least, most = groups.aminmax(dim=4, keepdim=True)
        scale = ((most - least) / 15).clamp_min_(_LEAST_SCALE)
        zero = _rounded(-least / scale).clamp_(0, 15)
        codes = _rounded(groups * (1 / scale) + zero).clamp_(0, 15)
        word = scale.view(torch.int32).bitwise_and(_SCALE_BITS).bitwise_or(zero.int())
        return codes.to(torch.uint8), word.view(torch.float32)

    def _dequantize(self, codes: Tensor, scale: Tensor) -> Tensor:
        word = scale.contiguous().view(torch.int32)
        zero = word.bitwise_and(~_SCALE_BITS).float()
        return (codes.float() - zero) * word.bitwise_and(_SCALE_BITS).view(torch.float32)


class Fp8PerTokenHead(_ServedFormat):
    """x' = q s of the head_dim numbers of a token, with s = max(max|x| / 448, 1e-6) in float32 and q the float8 e4m3
    nearest to x / s. 32 bits per token and head beside the codes: 8.25 bits per number at head_dim 128."""

    bits, scale_dtype = 8, "float32"

    def __init__(self, head_dim: int) -> None:
        super().__init__(head_dim, head_dim)

    def check(self, packed: Packed) -> None:
        refuse_unless(packed.parts["scale"].tensor >= 0, "scale")
        codes = bitpack.unpack(packed.parts["codes"].tensor, self.bits, self.head_dim)
        refuse_unless((codes & 0x7F) != 0x7F, "codes")  # not a number

    def _quantize(self, groups: Tensor) -> tuple[Tensor, Tensor]:
        scale = (groups.abs().amax(dim=4, keepdim=True) / _FP8_MAX).clamp_min_(_LEAST_SCALE)
        codes = (groups * (1 / scale)).clamp_(-_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), scale

    def _dequantize(self, codes: Tensor, scale: Tensor) -> Tensor:
        return codes.contiguous().view(torch.float8_e4m3fn).float() * scale


class QuantoCodec(UniformCodec):
    """`UniformCodec` of groups of adjacent channels of a token as quanto's `MaxOptimizer` computes it: range, scale and
    distances are each rounded to the dtype of the numbers. Codes, scales and zero-points (the negative of its `shift`)
    are quanto's, bit for bit, for a 16-bit model.

    Where the group does not divide head_dim, and quanto's groups span tokens, it is the next smaller size that does.
    """

    def __init__(self, bits: int, group: int, head_dim: int, dtype: torch.dtype | str = "float16") -> None:
        fitting = max(size for size in range(1, group + 1) if head_dim % size == 0)
        super().__init__(bits, "token", fitting, head_dim, dtype)

    def quantize(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        groups, most = self.grouped(x), 2**self.bits - 1
        low, high = (side + 0.0 for side in groups.aminmax(dim=self.group_dim, keepdim=True))
        span = to_side(high.float() - low.float(), str(x.dtype).removeprefix("torch."))  # finite, unlike quanto's
        zero, scale = to_side(low, self.zero_dtype), to_side(span / most, self.dtype)
        codes = self._steps(groups - zero.to(x.dtype), scale, 0, most).to(torch.uint8).view(x.shape)
        return codes, {"scale": scale.squeeze(self.group_dim), "zero": zero.squeeze(self.group_dim)}


def _reciprocal(scale: Tensor) -> Tensor:
    """Return 1 / scale, and 0 for 0."""
    return 1 / scale.masked_fill(scale == 0, torch.inf)


def _rounded(x: Tensor) -> Tensor:
    """Round to whole numbers, halves away from zero."""
    whole = x.trunc()
    return whole + (x - whole).mul_(2).trunc_()

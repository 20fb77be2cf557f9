"""The reference dequantizes the codecs' tensors as the codecs do."""

from __future__ import annotations

import pytest
import torch
from kvq_kernels.decode_attention import Codebook, Uniform
from pairwise import parametrize_pairwise

from kvq_cli.codecs.codebook import CodebookCodec
from kvq_cli.codecs.signed import SignedCodec
from kvq_cli.codecs.uniform import UniformCodec


def random_numbers(dim: int = 64) -> torch.Tensor:
    return torch.randn(2, 2, 64, dim, generator=torch.Generator().manual_seed(0))


def tensors(packed) -> dict[str, torch.Tensor]:
    return {name: part.tensor for name, part in packed.parts.items()}


@parametrize_pairwise({"bits": [1, 2, 3, 4, 8], "axis": ["channel", "token"], "dim": [64, 96]})
def test_uniform(bits, axis, dim):
    codec = UniformCodec(bits, axis, 32, dim)
    packed = codec.encode(random_numbers(dim))
    side = Uniform(**tensors(packed), bits=bits, axis=axis, group=32)
    torch.testing.assert_close(side.unpack(torch.float32), codec.decode(packed, torch.float32))


@pytest.mark.parametrize(("sign", "hybrid"), [("extra", "no"), ("extra", "always"), ("inside", "no")])
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_signed(sign, hybrid, axis):
    codec = SignedCodec(3, axis, 32, 64, sign=sign, hybrid=hybrid)
    x = random_numbers()
    x[:, :, :32] = 0.7  # constant groups
    packed = codec.encode(x)
    parts = tensors(packed)
    sign_words = parts.pop("sign_or_zero", parts.pop("sign", None))
    level = 3 if sign == "inside" else 0
    side = Uniform(**parts, bits=3, axis=axis, group=32, sign=sign_words, level=level, hybrid=hybrid == "always")
    torch.testing.assert_close(side.unpack(torch.float32), codec.decode(packed, torch.float32))


@pytest.mark.parametrize("block", [(1, 1), (1, 4), (4, 1), (2, 2)])
@pytest.mark.parametrize("entries", [16, 256])
def test_codebook(block, entries):
    g = torch.Generator().manual_seed(1)
    centroids = torch.randn(2, 16, entries, block[0] * block[1], generator=g)
    mean, std = torch.randn(2, 64, generator=g), torch.rand(2, 64, generator=g) + 0.5
    codec = CodebookCodec(centroids, block, 64, mean, std)
    packed = codec.encode(random_numbers())
    side = Codebook(**tensors(packed), centroids=centroids, block=block, mean=mean, std=std)
    torch.testing.assert_close(side.unpack(torch.float32), codec.decode(packed, torch.float32))

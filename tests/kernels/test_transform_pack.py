"""Encoding and packing of a transform's codes in the interpreter against the codec, bit for bit."""

from __future__ import annotations

import pytest
import torch
from checks.transform_pack import assert_same_bits, random_tensors, random_tokens
from kernel_cases import DEVICE
from kvq_kernels.transform_pack import transform_pack
from kvq_kernels.transform_pack.aot_cases import SHAPES
from random_transforms import random_transform

from kvq_cli.codecs import kernels
from kvq_cli.codecs.transform import TransformCodec, transform_codec

pytestmark = pytest.mark.gpu

#: Lanes of 1 to 16 bytes: each size of pieces, and several sizes.
PROFILES = [(1,), (3, 2), (7, 4, 1), (4, 4, 3, 3, 2), (8, 7, 5, 4, 3, 2, 2), (8, 8, 8, 8, 8, 5, 4, 4), (8,) * 8]


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("widths", PROFILES)
def test_profiles(widths, values):
    tensors = random_tensors(widths)
    assert_same_bits(tensors, values, random_tokens(tensors, rows=1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_types(seed, gain, dtype):
    tensors = random_tensors((4, 3, 2, 2, 1), gain=gain, seed=seed)
    assert_same_bits(tensors, seed == 1, random_tokens(tensors, dtype=dtype, seed=seed))


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_models(name):
    shape = SHAPES[name]
    tensors = random_tensors(shape.widths, shape.dim, min(shape.heads, 2), shape.gain)
    assert_same_bits(tensors, shape.values, random_tokens(tensors, rows=1, tokens=16, dtype=shape.dtype))


@pytest.mark.parametrize("values", [False, True])
def test_heads_of_different_widths(values, monkeypatch):
    """The codec packs by the kernel what it packs by PyTorch, of heads that keep fewer components than others, too."""
    tensors = random_transform([(4, 3, 2), (3, 2), (3, 2)], 3, 64, torch.Generator().manual_seed(0))
    own = {name: x.to(DEVICE) for name, x in tensors.items()}
    x = random_tokens(tensors)
    expected = transform_codec(3, tensors, values).encode(x.cpu()).parts
    monkeypatch.setattr(kernels, "on_gpu", lambda _: True)
    found = transform_codec(3, own, values).encode(x).parts
    assert found.keys() == expected.keys() and any(name.endswith("gain") for name in found)
    for name, part in found.items():
        assert part.unit == expected[name].unit
        assert torch.equal(part.tensor.cpu(), expected[name].tensor), name


def test_views():
    """Tokens that lie as a model computes them, a slice of rows and of tokens, channels apart."""
    tensors = random_tensors((3, 2, 2), dim=40, heads=3)
    x = random_tokens(tensors, rows=3, tokens=64)
    assert_same_bits(tensors, False, x.transpose(1, 2).contiguous().transpose(1, 2))
    assert_same_bits(tensors, True, x[1:, :, 16:48])
    assert_same_bits(tensors, True, x.transpose(2, 3).contiguous().transpose(2, 3))
    assert_same_bits(tensors, False, x[:, :, :0])


def test_shapes_that_do_not_fit_are_refused():
    tensors = {name: x.to(DEVICE) for name, x in random_tensors((3, 2)).items()}
    tables = TransformCodec(2, tensors, values=False).pack_tables()
    with pytest.raises(ValueError, match=r"tokens of shape \(1, 2, 15, 64\) for 2 groups of 64 channels"):
        transform_pack(torch.zeros(1, 2, 15, 64, device=DEVICE), tables)
    apart = tables._replace(center=tables.center.repeat(1, 2)[:, : tables.center.shape[1]])
    with pytest.raises(ValueError, match="contiguous tables"):
        transform_pack(torch.zeros(1, 2, 16, 64, device=DEVICE), apart, backend="triton")
    tensors = {name: x.to(DEVICE) for name, x in random_tensors((3, 2), dim=264, heads=1).items()}
    tables = TransformCodec(1, tensors, values=False).pack_tables()
    with pytest.raises(ValueError, match="groups have at most 256 channels, a multiple of 8, not 264"):
        transform_pack(torch.zeros(1, 1, 16, 264, device=DEVICE), tables, backend="triton")

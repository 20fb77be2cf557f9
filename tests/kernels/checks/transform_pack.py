"""Random transforms and tokens, and a check that kernel and reference encode and pack them as the codec does."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from kernel_cases import DEVICE
from kvq_kernels.transform_pack import transform_pack
from random_transforms import random_transform

from kvq_cli.codecs.transform import TransformCodec


def random_tensors(widths: Sequence[int], dim: int = 64, heads: int = 2, gain: bool = True, seed: int = 0):
    """Of a stream. A channel never varies, and the last component is always 0."""
    tensors = random_transform(widths, heads, dim, torch.Generator().manual_seed(seed), gain)
    tensors["std"][:, 3] = 0
    tensors["analysis"][:, -1] = 0
    if gain:
        tensors["deviation"][:, -1] = 0
    return tensors


def random_tokens(tensors, rows: int = 2, tokens: int = 32, dtype=torch.float16, seed: int = 1):
    """Tokens of very different sizes, one of zeros, and one beyond all codes."""
    g = torch.Generator().manual_seed(seed)
    heads, dim = tensors["mean"].shape
    x = torch.randn(rows, heads, tokens, dim, generator=g) * 2 ** (2 * torch.randn(rows, 1, tokens, 1, generator=g))
    x[:, :, 1], x[:, :, 2] = 0, 60_000
    return x.to(dtype).to(DEVICE)


def assert_same_bits(tensors, values: bool, x) -> None:
    """Assert that kernel and reference give the codec's bits, on a GPU those that it packs on a CPU."""
    heads = len(tensors["mean"])
    expected = TransformCodec(heads, tensors, values).encode(x.cpu()).parts
    tables = TransformCodec(heads, {name: own.to(DEVICE) for name, own in tensors.items()}, values).pack_tables()
    names = [part.name for part in tables.parts]
    for backend in ("triton", "torch"):
        codes, gains = transform_pack(x, tables, backend=backend)
        found = dict(zip(names, codes, strict=True)) | ({} if gains is None else {"gain": gains})
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.dtype == expected[name].tensor.dtype
            assert torch.equal(tensor.cpu(), expected[name].tensor), (backend, name)

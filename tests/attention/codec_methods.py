"""A method with arbitrary codecs, and codecs of every storage format that the kernels read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from random_transforms import random_transform

from kvq_cli.codecs.base import Codec
from kvq_cli.codecs.codebook import CodebookCodec
from kvq_cli.codecs.outliers import OutlierCodec
from kvq_cli.codecs.per_head import PerHeadCodec
from kvq_cli.codecs.per_token import PerTokenCodec
from kvq_cli.codecs.rotated import MatrixRotation, RotatedCodec
from kvq_cli.codecs.transform import TransformCodec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.methods.base import LayerPlan, Method, StreamPlan
from kvq_cli.methods.window import Window

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WINDOWS = {"sinks": 3, "recent": 5}


@dataclass(frozen=True)
class CodecMethod(Method):
    """Keys and values by given codecs. keys, values: make a codec for (kv_heads, head_dim)."""

    name = "codecs"
    keys: Callable[..., Codec]
    values: Callable[..., Codec]
    source: str = "pre_rope"
    window: Window = Window(3, 5, 4)
    nominal_bits = 2.0

    def __post_init__(self) -> None:
        pass

    def plan(self, layer, shape, tensors) -> LayerPlan:
        keys, values = self.keys(shape.kv_heads, shape.head_dim), self.values(shape.kv_heads, shape.head_dim)
        return LayerPlan(StreamPlan(self.source, keys, self.window), StreamPlan("value", values, self.window))


def codebook(block=(4, 1), entries=256, share=4, normal=True, shared=False) -> Callable[..., Codec]:
    def make(heads: int, dim: int) -> Codec:
        noise = torch.Generator().manual_seed(0)
        books = torch.randn(1 if shared else heads, dim // share, entries, block[0] * block[1], generator=noise)
        stats = torch.randn(2, heads, dim, generator=noise).mul_(0.3).add_(torch.tensor([[[0.0]], [[1.0]]])).to(DEVICE)
        return CodebookCodec(books.half().to(DEVICE), block, dim, *(stats if normal else ()))

    return make


def per_token(outliers: float) -> Callable[..., Codec]:
    base = codebook((1, 1), 16, 32, normal=False, shared=True)
    return lambda heads, dim: PerTokenCodec(base(heads, dim), heads, dim, outliers, torch.float32)


def outliers(heads: int, dim: int) -> Codec:
    edge = torch.ones(heads, dim, device=DEVICE)
    return OutlierCodec(codebook()(heads, dim), -edge, edge, 0.01, torch.float32)


def transform(values: bool, widths=None, joined=False, gain=True) -> Callable[..., Codec]:
    """Makes codecs of a transform per head, or of all heads."""

    def make(heads: int, dim: int) -> Codec:
        noise, groups = torch.Generator().manual_seed(int(values)), 1 if joined else heads
        width = heads * dim // groups
        drawn = random_transform(widths or (3, 2, 2, 1)[: width // 8], groups, width, noise, gain)
        return TransformCodec(heads, {name: x.to(DEVICE) for name, x in drawn.items()}, values)

    return make


def transforms(values: bool, *members: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[..., Codec]:
    """Makes codecs of transforms per head with different widths: (widths, kv heads) of each member."""

    def make(heads: int, dim: int) -> Codec:
        made = {"".join(map(str, widths)): (transform(values, widths)(len(own), dim), own) for widths, own in members}
        return PerHeadCodec(made, DEVICE)

    return make


def per_head(heads: int, dim: int) -> Codec:
    members = {
        name: (codebook(block)(1, dim), [head]) for head, (name, block) in enumerate([("t", (4, 1)), ("c", (1, 4))])
    }
    return PerHeadCodec(members, DEVICE)


def uniform_codes(heads: int, dim: int) -> Codec:
    return UniformCodec(4, "token", 16, dim)


def rotated(heads: int, dim: int) -> Codec:
    """By another matrix for each kv head."""
    noise = torch.randn(heads, dim, dim, generator=torch.Generator().manual_seed(0))
    matrix = torch.linalg.qr(noise).Q.contiguous().to(DEVICE)
    return RotatedCodec(uniform_codes(heads, dim), MatrixRotation(matrix, torch.ones(heads, dim, device=DEVICE)))


def per_head_rotated(heads: int, dim: int) -> Codec:
    return PerHeadCodec({"all": (rotated(heads, dim), list(range(heads)))}, DEVICE)


def rotated_below_outliers(heads: int, dim: int) -> Codec:
    edge = torch.ones(heads, dim, device=DEVICE)
    return OutlierCodec(rotated(heads, dim), -edge, edge, 0.01, torch.float32)

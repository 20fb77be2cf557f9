"""Codecs and layers for tests of the cache without a model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.rows import Rows
from kvq_cli.codecs.codebook import CodebookCodec
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.codecs.outliers import OutlierCodec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.methods.base import LayerPlan, StreamPlan
from kvq_cli.methods.window import Window

HEADS, DIM = 2, 16


def _codebook(tokens: int, channels: int) -> CodebookCodec:
    noise = torch.Generator().manual_seed(3)
    size = tokens * channels
    centroids = torch.randn(HEADS, DIM // size, 256, size, generator=noise).half()
    mean, std = torch.randn(HEADS, DIM, generator=noise).half(), torch.rand(HEADS, DIM, generator=noise).half() + 0.5
    return CodebookCodec(centroids, (tokens, channels), DIM, mean, std)


@pytest.fixture(scope="session")
def codecs() -> dict:
    """name -> codec for 2 kv heads of 16 channels."""
    edge = torch.ones(HEADS, DIM)
    return {
        "identity": IdentityCodec(),
        "channel": UniformCodec(2, "channel", 8, DIM),
        "token": UniformCodec(3, "token", 4, DIM),
        "temporal": _codebook(4, 1),
        "adjacent": _codebook(1, 4),
        "outliers": OutlierCodec(_codebook(2, 2), -2 * edge, 2 * edge, 0.01, torch.float16),
    }


@pytest.fixture
def layer(codecs) -> Callable[..., CompressedLayer]:
    """`layer("channel", Window(...), "token", Window(...))`: a layer with these codecs of post-RoPE keys and values."""

    def make(keys: str, key_window: Window, values: str, value_window: Window) -> CompressedLayer:
        plan = LayerPlan(
            StreamPlan("post_rope", codecs[keys], key_window), StreamPlan("value", codecs[values], value_window)
        )
        return CompressedLayer(0, plan)

    return make


@pytest.fixture
def feed() -> Callable[..., None]:
    """`feed(layer, rows, keys, values, mask)` appends columns `[batch, heads, columns, dim]` in one forward pass."""

    def run(layer: CompressedLayer, rows: Rows, keys: torch.Tensor, values: torch.Tensor, mask=None) -> None:
        layer.begin(rows.begin(layer.columns, keys.shape[2], keys.shape[0], mask))
        layer.update(keys, values)
        layer.absorb(keys)

    return run

"""Keys packed without their mean: the study's codec and its means."""

from __future__ import annotations

import pytest
import torch
from random_artifacts import tiny_model
from torch.testing import assert_close
from transformers import DynamicCache

from kvq_cli.cache_argument import cache_argument
from kvq_cli.codecs.uniform import UniformCodec
from lab.studies.key_means import SINKS, WINDOWS, CenteredCodec, key_means


def test_a_constant_costs_a_centered_codec_nothing():
    torch.manual_seed(0)
    x, mean = torch.randn(2, 3, 64, 32), 50 * torch.randn(1, 3, 1, 32)
    base = UniformCodec(2, "token", 32, 32, "float32")
    codec = CenteredCodec(base, mean)
    packed = codec.encode(x + mean)
    decoded = codec.decode(packed, torch.float32)
    assert_close(decoded - mean, base.decode(base.encode(x), torch.float32), atol=2e-5, rtol=0)
    assert (base.decode(base.encode(x + mean), torch.float32) - x - mean).square().mean() > 100 * (
        decoded - x - mean
    ).square().mean()
    queries = torch.randn(2, 3, 4, 32)
    assert_close(codec.products(queries, packed), queries @ decoded.mT, atol=2e-3, rtol=1e-5)


def test_means_are_those_of_keys_behind_the_first_tokens(monkeypatch):
    model = tiny_model()
    windows = torch.arange(4 * 40).view(4, 40) % 8
    monkeypatch.setattr("lab.studies.key_means.token_windows", lambda *args, **kwargs: windows)
    loaded = type("Loaded", (), {"model": model, "tokenizer": None})
    means, shares = key_means(loaded, 40)
    keys = []
    for window in windows:
        cache = DynamicCache()
        with torch.inference_mode():
            model(window[None], **cache_argument(cache), use_cache=True)
        keys.append([layer.keys[0, :, SINKS:] for layer in cache.layers])
    assert len(keys) == WINDOWS
    for layer, (mean, share) in enumerate(zip(means, shares, strict=True)):
        every = torch.cat([each[layer] for each in keys], dim=1)  # [heads, tokens, channels]
        assert_close(mean[0, :, 0], every.mean(1), atol=1e-5, rtol=1e-5)
        energy = every.square().sum((0, 2)).mean()
        assert share.item() == pytest.approx((every.mean(1).square().sum() / energy).item(), rel=1e-4)

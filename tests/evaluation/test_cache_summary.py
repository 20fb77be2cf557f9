"""Bits of several caches together."""

from __future__ import annotations

import pytest

from kvq_cli.evaluation.base import cache_summary


def record(tokens: float, compressed: float, packed_bits: float) -> dict:
    """A sample's record; 4 numbers of 16 bits per token, and the packed tokens in `packed_bits`."""
    held = (4 * compressed * packed_bits + 64 * (tokens - compressed)) / 8
    cache = {"tokens": tokens, "compressed": compressed, "bytes": held, "fp16_bytes": 8 * tokens}
    return {"cache": {**cache, "constant_bytes": 0, "nominal_bits": 2, "packed_bits": packed_bits}}


def test_packed_bits_are_those_of_all_packed_tokens():
    """A sample within the full-precision windows has none, and short ones weigh less."""
    records = [record(132, 100, 3.0), record(20, 0, 0.0), record(332, 300, 2.5)]
    summary = cache_summary(records)
    assert summary["packed_bits"] == pytest.approx((100 * 3.0 + 300 * 2.5) / 400)
    exact = sum(64 * (each["cache"]["tokens"] - each["cache"]["compressed"]) for each in records) / 8
    packed = sum(each["cache"]["bytes"] for each in records) - exact
    assert summary["packed_bits"] == pytest.approx(8 * packed / (4 * 400))  # bits of packed tokens by their numbers


def test_without_packed_tokens_there_are_no_packed_bits():
    assert cache_summary([record(20, 0, 0.0), record(30, 0, 0.0)])["packed_bits"] == 0

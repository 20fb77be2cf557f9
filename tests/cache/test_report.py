"""Reported bytes are the bytes of the tensors that can be reached from the cache."""

from __future__ import annotations

import pytest
import torch

from kvq_cli.cache.cache import CompressedCache
from kvq_cli.cache.rows import Rows
from kvq_cli.codecs.base import Codec
from kvq_cli.methods.window import Window

CASES = [
    ("identity", Window(0, 0, 1), "identity", Window(0, 0, 1)),
    ("channel", Window(0, 0, 16), "token", Window(0, 16, 1)),
    ("temporal", Window(8, 0, 4), "adjacent", Window(8, 0, 1)),
    ("outliers", Window(8, 5, 64), "temporal", Window(2, 30, 8)),
]


def storages(thing: object, actual: dict[int, int], seen: set[int]) -> dict[int, int]:
    """Address -> bytes of all tensor storages reachable from `thing`; codecs hold constants, not the sequence."""
    if id(thing) in seen or isinstance(thing, (str, int, float, bool, type(None), Codec, type)):
        return actual
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        actual[storage.data_ptr()] = storage.nbytes()
    elif isinstance(thing, dict):
        for value in thing.values():
            storages(value, actual, seen)
    elif isinstance(thing, (list, tuple, set)):
        for value in thing:
            storages(value, actual, seen)
    elif hasattr(thing, "__dict__"):
        storages(vars(thing), actual, seen)
    return actual


def held(thing: object) -> int:
    return sum(storages(thing, {}, set()).values())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("pads", [(0,), (0, 13, 13)])
def test_report_counts_the_bytes_of_the_tensors_held(layer, feed, case, pads):
    rows, layers = Rows(), [layer(*case), layer(*case)]
    cache = CompressedCache(layers, "exact", 2.0)
    cache.rows = rows
    assert cache.report().bytes == held(cache) == 0
    mask = torch.tensor([[0] * n + [1] * (400 - n) for n in pads])
    noise = torch.Generator().manual_seed(0)
    past = 0
    for chunk in (150, 1, 1, 90, *[1] * 70):
        x = torch.randn(len(pads), 2, chunk, 16, generator=noise).half()
        forward = rows.begin(past, chunk, len(pads), mask[:, : past + chunk])
        for one in layers:
            one.begin(forward)
            one.update(x, x.flip(3))
            one.absorb(x)
            one.tails = []  # attention's own, gone when it is done
        past += chunk
        report = cache.report()
        assert report.bytes == held(cache)
        assert min(report.parts.values()) >= 0
    tokens = sum(past - n for n in pads)
    assert report.tokens == tokens
    assert report.numbers == tokens * 2 * 16 * 2 * len(layers)
    assert report.fp16_bytes == 2 * report.numbers
    assert report.measured_bits == pytest.approx(8 * report.bytes / report.numbers)
    assert 0 < report.compressed <= tokens


def test_bytes_by_part_match_the_method(layer, feed):
    """2-bit codes with a 16-bit scale and zero for 8 numbers: 2 + 4 bits per packed number; all in whole blocks."""
    one = layer("channel", Window(0, 0, 8), "channel", Window(0, 0, 8))
    x = torch.randn(1, 2, 800, 16).half()
    feed(one, Rows(), x, x)
    report = CompressedCache([one], "exact", 2.0).report()
    numbers = 2 * 800 * 2 * 16
    assert report.parts["codes"] * 8 == 2 * numbers
    assert report.parts["scale"] * 8 == report.parts["zero"] * 8 == 2 * numbers
    assert report.packed_bits == 6.0
    assert (report.parts["sinks"], report.parts["recent"]) == (0, 0)
    ring = 2 * 8 * 2 * 16 * 2  # keys and values, 8 tokens, 2 heads, 16 channels, 2 bytes: room for the tokens to come
    assert report.parts["unused"] == ring
    assert report.measured_bits == 6 + 8 * ring / numbers


def test_constants_are_counted_once_and_separately(layer, codecs):
    case = ("temporal", Window(8, 0, 4), "temporal", Window(8, 0, 4))
    report = CompressedCache([layer(*case), layer(*case)], "exact", 2.0).report()
    sizes = {name: t.numel() * t.element_size() for name, t in codecs["temporal"].constants().items()}
    assert report.constants == {name: sizes[name] for name in ("centroids", "mean", "std")}
    assert report.tables == {name: sizes[name] for name in set(sizes) - set(report.constants)}
    assert report.bytes == 0 and report.measured_bits == 0


def test_report_as_text_and_json(layer, feed):
    one = layer("temporal", Window(8, 0, 4), "temporal", Window(8, 0, 4))
    x = torch.randn(1, 2, 300, 16).half()
    feed(one, Rows(), x, x)
    report = CompressedCache([one], "exact", 2.0).report()
    told = report.to_dict()
    assert told["bytes"] == sum(told["parts"].values()) == report.bytes
    assert told["compressed_tokens"] == 292
    for number in ("300 tokens", "292 compressed", f"{report.bytes:,} bytes", f"{report.measured_bits:.2f} bits"):
        assert number in str(report)

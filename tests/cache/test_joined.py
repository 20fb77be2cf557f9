"""Codes of all layers together: the same however tokens come, held once, and those of the formula."""

from __future__ import annotations

import itertools

import pytest
import torch
from random_joined import random_joined

from kvq_cli.attention.rotary import Rotation
from kvq_cli.cache.joined import JoinedLayers
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.rows import Rows
from kvq_cli.errors import KvqError
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.registry import build

LAYERS, HEADS, DIM, TOKENS = 3, 2, 16, 61
SHAPE = ModelShape(LAYERS, 4, HEADS, DIM, 64, "float32")
METHOD = build("kvtc", bits=4, sinks=3, recent=9, buffer=4)
PADS = (11, 0, 0)


@pytest.fixture(scope="module")
def numbers():
    """Queries, keys and values of each layer."""
    noise = torch.Generator().manual_seed(0)
    sizes = [(3, heads, TOKENS, DIM) for heads in (4, HEADS, HEADS)]
    return [[torch.randn(size, generator=noise) for size in sizes] for _ in range(LAYERS)]


def new_layers() -> list[CompressedLayer]:
    spec, joined, layers = METHOD.calibration(SHAPE), (JoinedLayers(), JoinedLayers()), []
    for index in range(LAYERS):
        tensors = {name: x for kind in "kv" for name, x in random_joined(spec, kind, SHAPE, index).items()}
        plan = METHOD.plan(index, SHAPE, tensors)
        layers.append(CompressedLayer(index, plan, Rotation("none", torch.empty(0), DIM), joined=joined))
    return layers


def feed(numbers, passes, layers=None, rows=slice(None), pads=PADS):
    """The layers, given the columns in passes of so many."""
    layers, described, past = layers or new_layers(), Rows(), 0
    mask = torch.tensor([[0] * count + [1] * (TOKENS - count) for count in pads])
    for columns in passes:
        forward = described.begin(past, columns, len(pads), mask[:, : past + columns])
        for layer, of_layer in zip(layers, numbers, strict=True):
            queries, keys, values = (x[rows, :, past : past + columns] for x in of_layer)
            layer.begin(forward)
            layer.capture_key(keys)
            layer.update(keys, values)
            layer.absorb(queries)
            layer.release()
        past += columns
    return layers


def held(layers) -> list[torch.Tensor]:
    return [x for layer in layers for stream in layer.streams for x in stream.snapshot().tensors().values()]


@pytest.mark.parametrize("passes", [[1] * TOKENS, [20, 9, *[1] * 20, 12], [40, *[7] * 3], [12, 1, 47, 1]])
def test_the_same_is_stored_however_tokens_come(numbers, passes):
    """In passes that pack tokens of their own, of earlier ones, and of both."""
    whole, other = feed(numbers, [TOKENS]), feed(numbers, passes)
    assert all(torch.equal(a, b) for a, b in zip(held(whole), held(other), strict=True))
    alone = feed(numbers, passes, rows=slice(1, 2), pads=(0,))
    for layer, single in zip(whole, alone, strict=True):
        for stream, own in zip(layer.streams, single.streams, strict=True):
            assert torch.equal(stream.read(1), own.read(0))


def test_codes_are_of_the_sum_over_layers_and_held_once(numbers):
    layers = feed(numbers, [TOKENS])
    for number in range(2):  # keys, values
        streams = [layer.streams[number] for layer in layers]
        packed = streams[0].window.packed(TOKENS)
        start = streams[0].window.sinks
        x = [of_layer[1 + number][1:, :, start : start + packed] for of_layer in numbers]
        z = sum(stream.codec.project(each) for stream, each in zip(streams, x, strict=True))
        expected = streams[0].codec.quantize(z)
        found = streams[0].store.read(slice(1, 3), 0, packed)
        assert packed > 0 and expected.parts.keys() == found.parts.keys()
        for name, part in expected.parts.items():
            assert torch.equal(part.tensor, found.parts[name].tensor), name
        for stream, each in zip(streams, x, strict=True):
            decoded = stream.codec.decode(expected, torch.float32)
            torch.testing.assert_close(stream.read(1)[:, :, start : start + packed], decoded[:1])
            assert (decoded - each).square().mean() < 1.2 * each.square().mean()
        codes = [sum(stream._packed_bytes().values()) for stream in streams]
        tokens = sum(streams[0].window.packed(length) for length in streams[0].lengths)
        assert codes == [tokens * sum(4 * group.words for group in streams[0].codec._coding.groups), 0, 0]


def test_removed_tokens_are_packed_again(numbers):
    layers = new_layers()
    for layer in layers:
        layer.allow_rollback(6)
    pads = (0, 0, 0)
    feed(numbers, [40], layers, pads=pads)
    for layer in layers:
        assert layer.croppable(6)
        layer.crop(6)
    expected = feed(numbers, [34], pads=pads)
    for layer, other in zip(layers, expected, strict=True):
        for stream, own in zip(layer.streams, other.streams, strict=True):
            assert all(torch.equal(stream.read(row), own.read(row)) for row in range(3))


def test_layers_must_come_in_order(numbers):
    layers = new_layers()
    with pytest.raises(KvqError, match="must take in their tokens in order"):
        feed(list(itertools.islice(numbers, 1)), [TOKENS], layers[1:2])

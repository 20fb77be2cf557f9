"""Formats of other engines: which channels are rotated, windows, refusals."""

import pytest
import torch

from kvq_cli.codecs.rotated import RotatedCodec
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.methods.window import Window


@pytest.mark.parametrize(
    ("name", "bits", "dim", "blocks"),
    [  # runs that keys and values are rotated in; None: they are not
        ("llama-cpp", 4, 128, (128, 64)),
        ("llama-cpp", 8, 192, (64, 64)),
        ("llama-cpp", 8, 256, (256, 64)),
        ("llama-cpp", 4, 96, (None, None)),
        ("per-token-head", 4, 128, (128, 128)),
        ("per-token-head", 4, 96, (32, 32)),
        ("per-token-head", 8, 128, (None, None)),
    ],
)
def test_methods_rotate_as_the_engines_do(name, bits, dim, blocks, shape_of):
    plan = build(name, bits=bits).plan(0, shape_of(head_dim=dim), {})
    one = torch.zeros(1, 1, 1, dim)
    one[..., 0] = 1
    for stream, block in zip(plan.kept, blocks, strict=True):
        rotated = isinstance(stream.codec, RotatedCodec)
        assert rotated == (block is not None)
        assert not rotated or stream.codec.rotation.ahead(one).count_nonzero() == block
    off = build("llama-cpp", rotation=False).plan(0, shape_of(head_dim=128), {})
    assert not any(isinstance(stream.codec, RotatedCodec) for stream in off.kept)


def test_no_token_stays_in_full_precision_unless_asked(shape):
    for name in ("llama-cpp", "per-token-head"):
        assert {stream.window for stream in build(name).plan(0, shape, {}).kept} == {Window(0, 0, 1)}
        asked = build(name, sinks=4, recent=32, buffer=8).plan(0, shape, {})
        assert {stream.window for stream in asked.kept} == {Window(4, 32, 8)}


def test_tokens_of_quanto_wait_in_full_precision(shape):
    assert {stream.window for stream in build("quanto").plan(0, shape, {}).kept} == {Window(0, 0, 128)}
    asked = build("quanto", sinks=4, recent=32, buffer=8).plan(0, shape, {})
    assert {stream.window for stream in asked.kept} == {Window(4, 32, 8)}
    with pytest.raises(UsageError, match=r"bits=8 is not one of 2, 4"):
        build("quanto", bits=8)


@pytest.mark.parametrize("name", ["llama-cpp", "per-token-head"])
def test_other_bits_are_refused(name):
    with pytest.raises(UsageError, match=r"bits=2 is not one of 4, 8"):
        build(name, bits=2)

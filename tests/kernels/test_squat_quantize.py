"""SQuat's quantization in the interpreter against the codec, bit for bit."""

from __future__ import annotations

import pytest
import torch
from checks.squat_quantize import assert_same_bits, by_kernel, random_keys

from kvq_cli.codecs.subspace import SubspaceCodec
from kvq_cli.codecs.uniform import UniformCodec

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_bits_and_head_dims(bits, dim):
    block = min(64, dim // 2)
    codec = SubspaceCodec(bits, 16, dim, rank=3, strength=0.05, block=block)
    assert_same_bits(codec, *random_keys(codec, rows=1), block)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_types(dtype, seed):
    codec = SubspaceCodec(2, 32, 64, dtype, rank=5, strength=0.02, block=32)
    assert_same_bits(codec, *random_keys(codec, dtype=dtype, seed=seed), 32)


@pytest.mark.parametrize(("block", "rank"), [(3, 2), (24, 16), (63, 1), (33, 60)])
def test_blocks_and_ranks(block, rank):
    codec = SubspaceCodec(2, 16, 64, rank=rank, strength=0.05, block=block)
    assert_same_bits(codec, *random_keys(codec, rows=1, heads=1), block)


@pytest.mark.parametrize(("group", "tokens"), [(1, 3), (7, 14), (48, 48), (128, 256)])
def test_groups(group, tokens):
    codec = SubspaceCodec(2, group, 64, rank=4, strength=0.05, block=32)
    assert_same_bits(codec, *random_keys(codec, rows=1, heads=1, tokens=tokens), 32)


def test_a_shared_subspace():
    codec = SubspaceCodec(2, 16, 64, rank=3, strength=0.05, block=32, shared=True)
    assert_same_bits(codec, *random_keys(codec, rows=3), 32)


def test_views():
    """Strided keys, and a slice of the state's rows."""
    codec = SubspaceCodec(2, 16, 64, rank=3, strength=0.05, block=32)
    keys, state = random_keys(codec, rows=3, tokens=64)
    assert_same_bits(codec, keys[1:, :, 16:48], {name: x[1:] for name, x in state.items()}, 32)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_without_strength_it_equals_plain_quantization(bits, dtype):
    codec = SubspaceCodec(bits, 32, 80, dtype, rank=5, strength=0.0, block=40)
    keys, state = random_keys(codec, dtype=dtype)
    parts = UniformCodec(bits, "channel", 32, 80, dtype).encode(keys).parts
    for name, tensor in zip(("codes", "scale", "zero"), by_kernel(codec, keys, state, 40), strict=True):
        assert torch.equal(tensor, parts[name].tensor), name


def test_errors_are_moved():
    codec = SubspaceCodec(2, 16, 64, rank=3, strength=0.5, block=32)
    keys, state = random_keys(codec)
    plain = UniformCodec(2, "channel", 16, 64).encode(keys).parts["codes"].tensor
    assert not torch.equal(by_kernel(codec, keys, state, 32)[0], plain)


def test_shapes_that_do_not_fit_are_refused():
    codec = SubspaceCodec(2, 16, 64, rank=3, strength=0.5, block=32)
    keys, state = random_keys(codec)
    with pytest.raises(ValueError, match="31 tokens in groups of 16"):
        by_kernel(codec, keys[:, :, :31], state, 32)
    with pytest.raises(ValueError, match="subspace of shape"):
        by_kernel(codec, keys[:, :1], state, 32)
    with pytest.raises(ValueError, match="gain of shape .* for 4 blocks"):
        by_kernel(codec, keys, state, 16)

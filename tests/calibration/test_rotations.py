"""Rotations of captured streams before clustering: OPQ lowers the error, Hadamard is the codec's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sylvester import sylvester

from kvq_cli.calibration.blocks import to_blocks
from kvq_cli.calibration.captured import CapturedStream, ClusterSettings
from kvq_cli.calibration.codebooks import calibrate_stream
from kvq_cli.calibration.rotations import _from_blocks, fit_rotation, rotate_stream
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.codebooks import codec_of
from kvq_cli.methods.specs import BlockShape, CodebookSpec

HEADS, DIM = 2, 16
SETTINGS = ClusterSettings(
    fisher=False, hybrid="off", points=2048, iterations=20, seed=0, dtype=torch.float32, engine="kvq"
)
CHANNEL = CodebookSpec((BlockShape("channel", 1, 4),), 256, 4, False, rotation="opq")


def mixed(samples: int = 6, tokens: int = 512) -> CapturedStream:
    """Few independent numbers of unequal size, spread over all channels by a random rotation of each head."""
    noise = torch.Generator().manual_seed(0)
    z = torch.randn(samples, tokens, HEADS, DIM, generator=noise) * 0.6 ** torch.arange(DIM)
    mixing = torch.linalg.qr(torch.randn(HEADS, DIM, DIM, generator=noise)).Q
    x = torch.einsum("sthd,hed->sthe", z, mixing).bfloat16()
    return CapturedStream(x, torch.randn(x.shape, generator=noise).bfloat16(), held_out=1)


def test_blocks_are_put_back():
    x = mixed(2, 24).x.float()
    for shape, share in ((BlockShape("t", 4, 1), 4), (BlockShape("c", 1, 4), 8), (BlockShape("m", 2, 2), 4)):
        assert torch.equal(_from_blocks(to_blocks(x, shape, share), shape, tuple(x.shape), share), x)


def test_opq_rotations_are_orthogonal_and_reproducible():
    captured = mixed()
    first, second = (fit_rotation(captured.x, CHANNEL, SETTINGS) for _ in range(2))
    assert torch.equal(first, second)
    torch.testing.assert_close(first @ first.mT, torch.eye(DIM).expand(HEADS, DIM, DIM), rtol=0, atol=1e-5)


def test_opq_is_fit_to_all_samples_but_the_held_out_ones():
    whole = mixed(7)
    stream = CapturedStream(whole.x, whole.g[:4], held_out=1)
    _, tensors = rotate_stream(stream, CHANNEL, SETTINGS)
    seen = whole.x[[0, 1, 2, 4, 5, 6]]
    torch.testing.assert_close(tensors["spread"], seen.float().square().mean((0, 1)).sqrt())
    assert torch.equal(tensors["rotation"], fit_rotation(seen, CHANNEL, SETTINGS))


def error(captured: CapturedStream, spec: CodebookSpec) -> float:
    """Relative squared error of the codec on the held-out sample."""
    tensors, _ = calibrate_stream(captured, spec, SETTINGS)
    codec = codec_of(spec, tensors, ModelShape(1, HEADS, HEADS, DIM, HEADS * DIM, "float32"), "layers.0.k")
    x = captured.x[-1:].float().transpose(1, 2)
    return ((codec.decode(codec.encode(x), torch.float32) - x).square().sum() / x.square().sum()).item()


@pytest.mark.parametrize("shape", [BlockShape("channel", 1, 4), BlockShape("temporal", 4, 1)])
def test_opq_lowers_the_held_out_error(shape):
    captured, spec = mixed(), replace(CHANNEL, shapes=(shape,))
    plain, opq = (error(captured, replace(spec, rotation=rotation)) for rotation in ("none", "opq"))
    assert opq < plain


def test_hadamard_streams_are_products_with_the_matrix():
    captured = mixed()
    rotated, tensors = rotate_stream(captured, replace(CHANNEL, rotation="hadamard"), SETTINGS)
    matrix = sylvester(DIM).float() / DIM**0.5
    for before, after in ((captured.x, rotated.x), (captured.g, rotated.g)):
        torch.testing.assert_close(after, (before.float() @ matrix.T).bfloat16(), rtol=1e-2, atol=1e-3)
    assert tensors == {}


def test_scores_of_rotated_gradients_are_those_of_the_loss():
    """g . x is the same before and after the rotation."""
    captured = mixed()
    rotated, tensors = rotate_stream(captured, CHANNEL, SETTINGS)
    products = [(c.x.float() * c.g.float()).sum(-1) for c in (captured, rotated)]
    torch.testing.assert_close(*products, rtol=0.05, atol=0.05)
    assert set(tensors) == {"rotation", "spread"} and tensors["spread"].shape == (HEADS, DIM)

"""OScaR's keys against their equations, in float64."""

import numpy as np
import torch
from sylvester import sylvester

from kvq_cli.codecs.rotated import HadamardRotation, RotatedCodec
from kvq_cli.codecs.token_norm import TokenNormCodec
from kvq_cli.codecs.uniform import UniformCodec

HEADS, TOKENS, DIM, GROUP = 2, 64, 64, 32


def keys() -> torch.Tensor:
    """Keys `[1, HEADS, TOKENS, DIM]` with the small norms of attention sinks among others, and one token of zeros."""
    x = torch.randn(1, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(0)) * 5
    x[:, :, :4] *= 0.01
    x[:, :, 40] = 0
    return x


def codec(bits: int = 2) -> RotatedCodec:
    return RotatedCodec(TokenNormCodec(UniformCodec(bits, "channel", GROUP, DIM)), HadamardRotation(DIM))


def test_decoded_keys_are_those_of_the_equations():
    x = keys().double().numpy()[0]
    rotation = sylvester(DIM).numpy() / DIM**0.5
    rotated = x @ rotation.T
    norm = np.sqrt((rotated**2).sum((0, 2)))[None, :, None]
    norm[norm == 0] = 1
    groups = (rotated / norm).reshape(HEADS, TOKENS // GROUP, GROUP, DIM)
    zero = np.float16(groups.min(2, keepdims=True)).astype(np.float64)
    scale = np.float16((groups.max(2, keepdims=True) - groups.min(2, keepdims=True)) / 3).astype(np.float64)
    codes = np.clip(np.round((groups - zero) / scale), 0, 3)
    wanted = (codes * scale + zero).reshape(rotated.shape) * norm @ rotation
    packed = codec().encode(keys())
    np.testing.assert_allclose(packed.parts["norm"].tensor[0].numpy(), norm, rtol=1e-5)
    own = codec().decode(packed, torch.float64).numpy()[0]
    close = np.isclose(own, wanted, rtol=1e-3, atol=1e-3 * np.abs(x).max())
    assert close.all(-1).mean() > 0.99  # a code between two levels moves all channels of its token


def test_tokens_of_small_norm_keep_their_direction():
    """What the scaling is for: without it, a group's range is that of its largest tokens."""
    x, plain = keys(), RotatedCodec(UniformCodec(2, "channel", GROUP, DIM), HadamardRotation(DIM))

    def error(each: RotatedCodec) -> float:
        lost = each.decode(each.encode(x), torch.float32) - x
        return (lost[:, :, :4].square().sum() / x[:, :, :4].square().sum()).item()

    assert error(codec()) < 0.3 < 1 < error(plain)


def test_bytes_are_codes_ranges_and_one_norm_for_all_heads():
    numbers = HEADS * TOKENS * DIM
    assert codec().encode(keys()).nbytes == numbers * 2 // 8 + 2 * 2 * numbers // GROUP + 4 * TOKENS

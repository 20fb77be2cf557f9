"""KVarN's codec against the equations of the authors' code, written with logarithms in float64."""

import numpy as np
import pytest
import torch
from sylvester import sylvester

from kvq_cli.codecs.balanced import BalancedCodec
from kvq_cli.codecs.base import Packed, Part
from kvq_cli.codecs.bits import unpack
from kvq_cli.codecs.rotated import HadamardRotation, RotatedCodec
from kvq_cli.errors import KvqError, UsageError

GROUP, DIM = 32, 64


def tiles(count: int = 3) -> np.ndarray:
    """`[count, GROUP, DIM]` whose tokens and channels have very different deviations, tokens of tiny numbers too."""
    noise = np.random.default_rng(0)
    tokens, channels = (np.exp(1.5 * noise.standard_normal((count, n, 1))) for n in (GROUP, DIM))
    tokens[:, 0] *= 1e-4
    return noise.standard_normal((count, GROUP, DIM)) * tokens * channels.transpose(0, 2, 1) + 0.3


def imbalance(y: np.ndarray) -> float:
    return sum(s.max() / max(s.min(), 1e-8) for s in (y.std(0, ddof=1), y.std(1, ddof=1)))


def balanced(tile: np.ndarray, iterations: int) -> tuple[np.ndarray, np.ndarray]:
    """Scales of rows and of columns of one tile `[R, C]`: the least imbalance of all iterations, the last of equals."""
    columns, rows = np.zeros((1, tile.shape[1])), np.zeros((tile.shape[0], 1))
    found = [(imbalance(tile), np.exp(rows), np.exp(columns))]
    for _ in range(iterations):
        y = tile / np.exp(columns) / np.exp(rows)
        columns = np.clip(columns + np.log(np.clip(y.std(0, ddof=1, keepdims=True), 1e-3, 1e3)), -0.3, 10)
        y = tile / np.exp(columns) / np.exp(rows)
        rows = np.clip(rows + np.log(np.clip(y.std(1, ddof=1, keepdims=True), 1e-3, 1e3)), -0.3, 10)
        found.append((imbalance(tile / np.exp(columns) / np.exp(rows)), np.exp(rows), np.exp(columns)))
    return min(reversed(found), key=lambda entry: entry[0])[1:]


def expected(tile: np.ndarray, bits: int, iterations: int) -> tuple[np.ndarray, np.ndarray]:
    """(codes, decoded numbers) of one tile `[R, C]`, each row with a range of its own."""
    rows, columns = balanced(tile, iterations)
    y = tile / rows / columns
    least = y.min(1, keepdims=True)
    step = np.maximum((y.max(1, keepdims=True) - least) / (2**bits - 1), 1e-10)
    codes = np.clip(np.round((y - least) / step), 0, 2**bits - 1)
    scale, zero, columns = (np.float16(side).astype(np.float64) for side in (rows * step, rows * least, columns))
    return codes, (codes * scale + zero) * columns


@pytest.mark.parametrize("axis", ["channel", "token"])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("iterations", [0, 1, 16])
def test_codes_and_decoded_numbers_are_those_of_the_equations(iterations, bits, axis):
    codec, x = BalancedCodec(bits, axis, GROUP, DIM, iterations), tiles()
    packed = codec.encode(torch.from_numpy(x.reshape(1, 1, -1, DIM)).float())
    codes = unpack(packed.parts["codes"].tensor, bits, DIM).view(-1, GROUP, DIM).numpy()
    decoded = codec.decode(packed, torch.float64).view(-1, GROUP, DIM).numpy()
    for tile, own_codes, own in zip(np.float32(x).astype(np.float64), codes, decoded, strict=True):
        keys = axis == "channel"
        wanted_codes, wanted = expected(tile.T if keys else tile, bits, iterations)
        wanted_codes, wanted = (wanted_codes.T, wanted.T) if keys else (wanted_codes, wanted)
        same = own_codes == wanted_codes
        assert same.mean() > 0.999  # others lie between two levels, up to rounding
        np.testing.assert_allclose(own[same], wanted[same], rtol=2e-3, atol=1e-4 * np.abs(wanted).max())


def test_balancing_makes_the_error_of_a_tile_smaller():
    """Of tokens whose deviations differ, in groups along tokens as keys have."""
    x = torch.from_numpy(tiles().reshape(1, 1, -1, DIM)).float()

    def error(iterations: int) -> float:
        codec = BalancedCodec(2, "channel", GROUP, DIM, iterations)
        lost = codec.decode(codec.encode(x), torch.float32) - x
        return (lost.square().sum(-1) / x.square().sum(-1)).mean().item()  # of each token beside its own size

    assert error(16) < 0.5 * error(0)


def test_rotated_keys_have_the_scores_of_the_rotation():
    codec = RotatedCodec(BalancedCodec(8, "channel", GROUP, DIM), HadamardRotation(DIM))
    noise = torch.Generator().manual_seed(1)
    x, q = torch.randn(1, 2, GROUP, DIM, generator=noise), torch.randn(1, 2, 3, DIM, generator=noise)
    packed = codec.encode(x)
    rotation = sylvester(DIM) / DIM**0.5
    y = codec.base.decode(packed, torch.float64)
    torch.testing.assert_close(codec.decode(packed, torch.float64), y @ rotation, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(codec.products(q, packed).double(), q.double() @ (y @ rotation).mT, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(codec.decode(packed, torch.float32), x, rtol=0, atol=0.1)


def test_bytes_are_those_of_the_preset_of_vllm():
    """`kvarn_k4v2_g128` at head_dim 128: packed codes, and three rows of float16 for keys and for values."""
    x = torch.randn(1, 1, 128, 128)
    keys, values = (BalancedCodec(*each, 128, 128).encode(x).nbytes for each in ((4, "channel"), (2, "token")))
    assert keys == 128 * 128 * 4 // 8 + (2 * 128 + 128) * 2
    assert values == 128 * 128 * 2 // 8 + (128 + 2 * 128) * 2


def test_constant_tiles_stay_constant():
    for value in (0.0, 3.0):
        x = torch.full((1, 1, GROUP, DIM), value)
        codec = BalancedCodec(2, "channel", GROUP, DIM)
        torch.testing.assert_close(codec.decode(codec.encode(x), torch.float32), x, rtol=1e-3, atol=0)


def test_refusals():
    with pytest.raises(UsageError, match="bits=5"):
        BalancedCodec(5, "channel", GROUP, DIM)
    with pytest.raises(UsageError, match="group=1"):
        BalancedCodec(2, "channel", 1, DIM)
    codec = BalancedCodec(2, "token", GROUP, DIM)
    packed = codec.encode(torch.randn(1, 1, GROUP, DIM))
    for name in ("scale", "balance"):
        part = packed.parts[name]
        with pytest.raises(KvqError, match=name):
            codec.check(Packed(GROUP, {**packed.parts, name: Part(-part.tensor, part.unit)}))

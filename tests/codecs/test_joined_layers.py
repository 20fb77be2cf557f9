"""Principal components of several layers against their formulas in float64."""

import numpy as np
import pytest
import torch

from kvq_cli.codecs.component_groups import ComponentGroups, Group
from kvq_cli.codecs.joined_layers import JoinedLayersCodec
from kvq_cli.errors import KvqError

LAYERS, HEADS, DIM, TOKENS = 3, 2, 24, 7
NUMBERS = LAYERS * HEADS * DIM
#: Components and bits of a group, and how many follow each other.
RUNS = [(16, 16, 1), (16, 8, 1), (64, 4, 1), (16, 2, 2)]
GROUPS = [Group(size, bits) for size, bits, count in RUNS for _ in range(count)]
COMPONENTS = 128


@pytest.fixture(scope="module")
def layers():
    """The codecs of all layers, an orthonormal basis `[NUMBERS, COMPONENTS]` and the means."""
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(NUMBERS, COMPONENTS, generator=generator, dtype=torch.float64)).Q
    means = torch.randn(LAYERS, HEADS, DIM, generator=generator)
    shared = {"groups": torch.tensor(GROUPS, dtype=torch.int32), "spread": torch.ones(HEADS, DIM)}
    codecs = [
        JoinedLayersCodec({**shared, "basis": rows.float(), "mean": mean}, NUMBERS, "float16", holds=place == 0)
        for place, (rows, mean) in enumerate(zip(basis.split(HEADS * DIM), means, strict=True))
    ]
    return codecs, basis, means


@pytest.fixture(scope="module")
def x():
    return 2 * torch.randn(LAYERS, 2, HEADS, TOKENS, DIM, generator=torch.Generator().manual_seed(1))


def encoded(codecs, x):
    return codecs[0].quantize(sum(codec.project(numbers) for codec, numbers in zip(codecs, x, strict=True)))


def side_by_side(x: torch.Tensor) -> np.ndarray:
    """`[layers, B, heads, T, D]` -> `[B, T, layers * heads * D]` float64."""
    return x.permute(1, 3, 0, 2, 4).flatten(2).double().numpy()


def bits_of(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Number c of a row is in word c % W, at bit `bits` * (c // W)."""
    width = words.shape[-1]
    at = np.arange(count)
    return words.astype(np.int64)[..., at % width] >> bits * (at // width) & 2**bits - 1


def test_codes_are_the_nearest_to_the_projection_and_each_layer_decodes_its_rows(layers, x):
    codecs, basis, means = layers
    packed = encoded(codecs, x)
    z = (side_by_side(x) - means.flatten().double().numpy()) @ basis.numpy()
    part = {name: part.tensor[:, 0].numpy() for name, part in packed.parts.items()}
    decoded, word, side, start = np.empty_like(z), 0, 0, 0
    for size, bits, count in RUNS:  # equal groups in a row are packed together
        own = z[..., start : start + count * size].reshape(*z.shape[:2], count, size)
        if bits == 16:
            found = part["exact"].reshape(own.shape)
            np.testing.assert_allclose(found, own, rtol=2**-10, atol=1e-5)
        else:
            scale, zero = (part[name][..., side : side + count, None].astype(np.float64) for name in ("scale", "zero"))
            least, most = own.min(-1, keepdims=True), own.max(-1, keepdims=True)
            np.testing.assert_allclose(zero, least, rtol=2**-10, atol=1e-5)
            np.testing.assert_allclose(scale, (most - least) / (2**bits - 1), rtol=2**-10)
            words = count * size * bits // 32
            codes = bits_of(part["codes"][..., word : word + words], bits, count * size)
            found = codes.reshape(own.shape) * scale + zero
            # Nearest codes; the ends of the range are rounded to 16 bits.
            assert (np.abs(found - own) <= scale / 2 + 2**-9 * np.abs(own).max()).all()
            word, side = word + words, side + count
        decoded[..., start : start + count * size] = found.reshape(*z.shape[:2], -1)
        start += count * size
    expected = decoded @ basis.numpy().T + means.flatten().double().numpy()
    read = torch.stack([codec.decode(packed, torch.float32) for codec in codecs])
    np.testing.assert_allclose(side_by_side(read), expected, atol=2e-5)


def test_errors_are_those_of_dropped_components_and_of_codes(layers, x):
    """Without codes' errors, what is lost is what is orthogonal to the basis."""
    codecs, basis, means = layers
    centered = side_by_side(x) - means.flatten().double().numpy()
    read = torch.stack([codec.decode(encoded(codecs, x), torch.float64) for codec in codecs])
    lost = side_by_side(read) - side_by_side(x)
    outside = centered - centered @ basis.numpy() @ basis.numpy().T
    z = torch.from_numpy(centered @ basis.numpy())[:, None].float()
    coding = ComponentGroups(GROUPS, "float16")
    of_codes = (coding.decode(coding.encode(z)) - z).double().square().sum().item()
    assert (lost**2).sum() == pytest.approx((outside**2).sum() + of_codes, rel=1e-4)


def test_the_first_layer_alone_counts_the_codes(layers):
    codecs, *_ = layers
    parts = [codec.layout(HEADS, DIM, "float16").parts for codec in codecs]
    assert sum(part.nbytes(1) for part in parts[0].values()) == 4 * sum(group.words for group in GROUPS)
    assert parts[1:] == [{}, {}]
    assert codecs[0].nominal_bits == 32 * sum(group.words for group in GROUPS) / NUMBERS
    assert [codec.waiting_bytes for codec in codecs] == [4 * COMPONENTS, 0, 0]


def test_scales_below_zero_are_refused(layers, x):
    packed = encoded(layers[0], x)
    packed.parts["scale"].tensor[0, 0, 0, 0] = -1
    with pytest.raises(KvqError, match="scale holds numbers that cannot have been packed"):
        layers[0][1].check(packed)

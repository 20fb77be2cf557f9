"""Per-token scaling against a loop in float64, and storage of outliers."""

import numpy as np
import pytest
import torch

from kvq_cli.codecs.codebook import CodebookCodec
from kvq_cli.codecs.per_token import PerTokenCodec, capacity
from kvq_cli.errors import UsageError

POINTS = [-0.9, -0.2, 0.15, 0.85]


def numbers(heads, dim, tokens=64, seed=0):
    x = torch.randn(2, heads, tokens, dim, generator=torch.Generator().manual_seed(seed))
    return (x**3 + 0.3).half()


def codec(heads, dim, outliers, points=POINTS):
    books = torch.tensor(points).view(1, 1, -1, 1)
    return PerTokenCodec(CodebookCodec(books, (1, 1), dim), heads, dim, outliers, torch.float16)


def by_loop(x, outliers, points=POINTS):
    """Decoded numbers by a float64 loop; NaN where two points, or two outliers, are about equal."""
    batch, heads, tokens, dim = x.shape
    out, points = np.empty(x.shape), np.array(points)
    for b in range(batch):
        for t in range(tokens):
            token = x[b, :, t].double().numpy().ravel()
            low, high = np.quantile(token, [outliers / 2, 1 - outliers / 2])
            outside = np.maximum(token - high, low - token)
            order = np.argsort(-outside, kind="stable")
            count = max(1, int(outliers * token.size)) if outliers else 0
            kept = order[:count]
            rest = np.delete(token, kept)
            zero, scale = (np.float16(v) for v in ((rest.max() + rest.min()) / 2, (rest.max() - rest.min()) / 2))
            distance = np.abs((token - float(zero))[:, None] / float(scale) - points)
            near = np.sort(distance, axis=1)
            decoded = points[distance.argmin(1)] * float(scale) + float(zero)
            decoded[near[:, 1] - near[:, 0] < 1e-3] = np.nan
            decoded[kept] = token[kept]
            if count and outside[order[count - 1]] - outside[order[count]] < 1e-5:
                decoded[:] = np.nan
            out[b, :, t] = decoded.reshape(heads, dim)
    return torch.from_numpy(out)


@pytest.mark.parametrize("outliers", [0, 0.01, 0.04, 0.3])
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (2, 64), (3, 80)])
def test_codec_equals_a_loop_in_float64(heads, dim, outliers):
    x, own = numbers(heads, dim), codec(heads, dim, outliers)
    decoded, expected = own.decode(own.encode(x), torch.float64), by_loop(x, outliers)
    clear = ~expected.isnan()
    assert clear.float().mean() > 0.95
    torch.testing.assert_close(decoded[clear], expected[clear], rtol=1e-5, atol=1e-5)


def test_all_numbers_as_outliers_decode_exactly():
    x, own = numbers(2, 64), codec(2, 64, 1.0)
    assert torch.equal(own.decode(own.encode(x), x.dtype), x)


@pytest.mark.parametrize(("heads", "dim", "outliers", "kept"), [(2, 64, 0.01, 1), (8, 128, 0.01, 10), (1, 64, 0.01, 1)])
def test_bytes_of_codes_ranges_outliers_and_head_starts(heads, dim, outliers, kept):
    x = numbers(heads, dim)
    assert capacity(outliers, heads * dim) == kept
    packed = codec(heads, dim, outliers).encode(x)
    assert packed.nbytes == 2 * 64 * (heads * dim * 2 // 8 + 2 + 2 + 4 * kept) + 2 * 2 * (heads + 1) * 4
    assert codec(heads, dim, 0).encode(x).nbytes == 2 * 64 * (heads * dim * 2 // 8 + 2 + 2)


def test_outliers_narrow_only_the_range_of_their_token():
    x = torch.rand(1, 2, 32, 64).half()
    x[0, 1, 3, 7] = 500.0
    with_, without = codec(2, 64, 0.01), codec(2, 64, 0)
    assert with_.encode(x).parts["scale"].tensor.max() < 1
    assert without.encode(x).parts["scale"].tensor.flatten().argmax() == 3
    assert with_.decode(with_.encode(x), torch.float32)[0, 1, 3, 7] == 500


def test_constant_token_is_exact():
    x = torch.full((1, 2, 32, 64), 0.25).half()
    for outliers in (0, 0.01):
        own = codec(2, 64, outliers)
        assert torch.equal(own.decode(own.encode(x), x.dtype), x)


def test_outliers_of_each_head_are_found():
    """All outliers of a token are in one head, alternating; heads without outliers have empty lists."""
    x = torch.rand(1, 3, 64, 64).half()
    for t in range(64):
        x[0, t % 2, t, t] = 100 + t
    packed = codec(3, 64, 0.01).encode(x)
    start = packed.parts["outlier_start"].tensor
    assert start.tolist() == [[[[0, 16, 32, 32]] * 2]]
    index, value = (packed.parts[f"outlier_{name}"].tensor[0, 0] for name in ("index", "value"))
    even = [t * 64 + t for t in range(0, 32, 2)]
    assert index[0].tolist() == even + [place + 65 for place in even]
    assert value[1].tolist() == [100 + t for t in (*range(32, 64, 2), *range(33, 64, 2))]


def test_blocks_beyond_16_bit_indices_are_refused():
    assert codec(257, 128, 0.01).block_tokens == 32
    assert codec(2, 2048, 0).block_tokens == 1
    with pytest.raises(UsageError, match="32 tokens by 2048 channels needs .* at most 32768 numbers"):
        codec(2, 2048, 0.01)

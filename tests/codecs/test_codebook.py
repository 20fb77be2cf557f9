"""The codebook codec against loops over single blocks, and the relations between block shapes."""

import pytest
import torch

from kvq_cli.codecs.codebook import CodebookCodec, in_half
from kvq_cli.errors import UsageError

SHAPES = [(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2)]


def codebooks(block, head_dim=32, heads=2, share=8, entries=256, dtype=torch.float32, seed=0):
    size = block[0] * block[1]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, head_dim // share, entries, size, generator=generator).to(dtype)


def assert_equal_where_clear(decoded, expected):
    clear = ~expected.isnan()
    assert clear.float().mean() > 0.8
    torch.testing.assert_close(decoded[clear], expected[clear], rtol=1e-5, atol=1e-5)


def numbers(tokens=16, head_dim=32, heads=2, seed=1):
    return torch.randn(2, heads, tokens, head_dim, generator=torch.Generator().manual_seed(seed))


def by_loops(x, centroids, block, mean, std):
    """The nearest centroid of each block in float64; NaN where two are equally near."""
    (tokens, channels), (heads, groups) = block, centroids.shape[:2]
    share = x.shape[3] // groups
    u = (x.double() - mean.unsqueeze(1)) / std.unsqueeze(1)
    out = torch.empty_like(u)
    for b in range(x.shape[0]):
        for h in range(heads):
            for t in range(0, x.shape[2], tokens):
                for d in range(0, x.shape[3], channels):
                    book = centroids[h, d // share].double()
                    v = u[b, h, t : t + tokens, d : d + channels].reshape(1, -1)
                    (near, next_near), (entry, _) = torch.cdist(v, book).squeeze(0).topk(2, largest=False)
                    actual = book[entry] if next_near - near > 1e-4 else torch.full_like(book[entry], torch.nan)
                    out[b, h, t : t + tokens, d : d + channels] = actual.view(tokens, channels)
    return out * std.unsqueeze(1) + mean.unsqueeze(1)


@pytest.mark.parametrize("block", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_codec_equals_exhaustive_search(block, dtype):
    centroids, x = codebooks(block, dtype=dtype), numbers(8)
    mean, std = numbers(1)[0, :, 0], numbers(1, seed=2)[0, :, 0].abs() + 0.5
    codec = CodebookCodec(centroids, block, 32, mean, std)
    packed = codec.encode(x)
    assert packed.nbytes == x.numel() // (block[0] * block[1])
    assert_equal_where_clear(codec.decode(packed, torch.float64), by_loops(x, centroids, block, mean, std))


@pytest.mark.parametrize("block", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_numbers_by_channel_and_weighted_sums_are_those_of_decode(block, dtype, shared):
    x = numbers(24, heads=3)
    mean, std = numbers(1, heads=3)[0, :, 0], numbers(1, heads=3, seed=2)[0, :, 0].abs() + 0.5
    centroids = codebooks(block, heads=1 if shared else 3, dtype=dtype)
    for statistics in ((mean, std), (None, None)):
        codec = CodebookCodec(centroids, block, 32, *statistics)
        packed = codec.encode(x)
        expected = codec.decode(packed, torch.float32)
        assert torch.equal(codec.decode_by_channel(packed), expected.mT)
        weights = torch.randn(2, 3, 5, 24)
        torch.testing.assert_close(codec.weighted_sum(weights, packed), weights @ expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 4, 8])
def test_channel_blocks_of_the_transpose_equal_temporal_blocks(length):
    """With one codebook per head, ChannelKV on x^T is TemporalKV on x; at chunk length 1 they are the same codec."""
    x = numbers(tokens=24, head_dim=40)
    centroids = torch.randn(2, 1, 256, length).half()
    temporal = CodebookCodec(centroids, (length, 1), 40)
    channel = CodebookCodec(centroids, (1, length), 24)
    a, b = temporal.encode(x), channel.encode(x.transpose(2, 3))
    assert torch.equal(a.parts["codes"].tensor, b.parts["codes"].tensor.transpose(2, 3))
    assert torch.equal(temporal.decode(a, torch.float32), channel.decode(b, torch.float32).transpose(2, 3))


def test_scalar_codebook_gives_the_nearest_point():
    points = torch.randn(256).sort().values
    codec = CodebookCodec(points.view(1, 1, 256, 1).expand(2, 4, 256, 1), (1, 1), 32)
    x = numbers()
    edges = (points[1:] + points[:-1]) / 2
    expected = points[torch.bucketize(x, edges)]
    error = (codec.decode(codec.encode(x), torch.float32) - x).abs()
    torch.testing.assert_close(error, (expected - x).abs(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("entries", "bits"), [(2, 1), (4, 2), (8, 3), (16, 4)])
def test_small_codebooks_are_bit_packed(entries, bits):
    centroids, x = codebooks((1, 1), entries=entries), numbers()
    codec = CodebookCodec(centroids, (1, 1), 32)
    packed = codec.encode(x)
    assert codec.nominal_bits == bits
    assert packed.nbytes * 8 == bits * x.numel()
    expected = by_loops(x, centroids, (1, 1), torch.zeros(2, 32), torch.ones(2, 32))
    assert_equal_where_clear(codec.decode(packed, torch.float64), expected)


@pytest.mark.parametrize("block", [(1, 1), (4, 1), (1, 4)], ids=str)
def test_shared_codebooks_serve_all_heads(block):
    one, x = codebooks(block, heads=1), numbers(heads=3)
    mean, std = numbers(1, heads=3)[0, :, 0], numbers(1, heads=3, seed=2)[0, :, 0].abs() + 0.5
    shared, copied = (CodebookCodec(c, block, 32, mean, std) for c in (one, one.repeat(3, 1, 1, 1)))
    assert torch.equal(shared.encode(x).parts["codes"].tensor, copied.encode(x).parts["codes"].tensor)
    assert torch.equal(shared.decode(shared.encode(x), x.dtype), copied.decode(copied.encode(x), x.dtype))
    assert shared.constants()["centroids"].numel() * 3 == copied.constants()["centroids"].numel()


def test_centroids_decode_to_themselves():
    centroids = codebooks((4, 1), share=4, dtype=torch.float16)  # 8 codebooks per head, 4 channels each
    x = centroids.permute(0, 2, 3, 1).reshape(1, 2, 1024, 8).repeat_interleave(4, dim=3)
    codec = CodebookCodec(centroids, (4, 1), 32)
    packed = codec.encode(x)
    assert torch.equal(codec.decode(packed, torch.float16), x)
    assert torch.equal(packed.parts["codes"].tensor[0, 0, :, 0].long(), torch.arange(256))


@pytest.mark.parametrize("block", [(2, 1), (4, 1), (8, 1), (1, 4)], ids=str)
def test_unaligned_codebooks(block):
    """Tensors read from a file are slices of one storage, at any offset."""
    centroids, x = codebooks(block, dtype=torch.float16), numbers(8)
    for place in (1, 3, 8):
        storage = torch.cat([torch.zeros(place, dtype=torch.float16), centroids.flatten()])
        codec = CodebookCodec(storage[place:].view(centroids.shape), block, 32)
        expected = CodebookCodec(centroids, block, 32)
        assert torch.equal(codec.decode(codec.encode(x), x.dtype), expected.decode(expected.encode(x), x.dtype))


def test_numbers_far_outside_the_codebook_get_the_nearest_centroid():
    centroids = torch.linspace(-1, 1, 256).view(1, 1, 256, 1).expand(2, 1, 256, 1)
    codec = CodebookCodec(centroids, (1, 1), 32)
    far = torch.tensor([1e30, -1e30, 60.0, -60.0]).repeat(8).expand(1, 2, 4, 32)
    assert torch.equal(codec.decode(codec.encode(far), torch.float32), far.sign())


def test_constant_channel_decodes_to_its_mean():
    codec = CodebookCodec(codebooks((4, 1)), (4, 1), 32, torch.full((2, 32), 0.25), torch.zeros(2, 32))
    x = torch.full((1, 2, 4, 32), 0.25)
    assert torch.equal(codec.decode(codec.encode(x), torch.float32), x)


@pytest.mark.parametrize(
    ("shape", "block", "head_dim"),
    [
        ((2, 8, 256, 4), (2, 1), 32),
        ((2, 5, 256, 4), (4, 1), 32),
        ((2, 16, 256, 4), (1, 4), 32),
        ((2, 8, 100, 4), (4, 1), 32),
    ],
)
def test_codebooks_that_do_not_fit_the_block_are_refused(shape, block, head_dim):
    with pytest.raises(UsageError, match="codebooks of"):
        CodebookCodec(torch.zeros(shape), block, head_dim)


def test_bfloat16_centroids_are_stored_as_float16_on_a_gpu():
    """Exact except near zero, where float16 has steps of 2^-24."""
    centroids = codebooks((4, 1), dtype=torch.bfloat16)
    halves = in_half(centroids)
    assert halves.dtype == torch.float16
    assert torch.equal(halves.to(torch.bfloat16)[centroids.abs() > 2**-14], centroids[centroids.abs() > 2**-14])
    assert (halves.float() - centroids.float()).abs().max() <= 2**-25
    large = centroids * 2**17
    assert in_half(large) is large

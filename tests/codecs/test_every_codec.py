"""Requirements of every codec: independent blocks, bit for bit, and bytes counted from its tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_transforms import random_transform

from kvq_cli.codecs import base
from kvq_cli.codecs.balanced import BalancedCodec
from kvq_cli.codecs.base import Packed, Part, Prompt
from kvq_cli.codecs.clipped import ClippedCodec
from kvq_cli.codecs.codebook import CodebookCodec
from kvq_cli.codecs.first_channel import FirstChannelCodec
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.codecs.joined_layers import JoinedLayersCodec
from kvq_cli.codecs.layout import TensorSpec, spec_of
from kvq_cli.codecs.lloyd_max import LloydMaxCodec
from kvq_cli.codecs.normalized import NormalizedCodec
from kvq_cli.codecs.outliers import OutlierCodec
from kvq_cli.codecs.per_head import PerHeadCodec
from kvq_cli.codecs.per_token import PerTokenCodec
from kvq_cli.codecs.rotated import HadamardRotation, MatrixRotation, RotatedCodec
from kvq_cli.codecs.served_formats import Q4_0, Q8_0, Fp8PerTokenHead, Int4PerTokenHead, QuantoCodec
from kvq_cli.codecs.signed import SignedCodec
from kvq_cli.codecs.subspace import SubspaceCodec
from kvq_cli.codecs.token_norm import TokenNormCodec
from kvq_cli.codecs.transform import TransformCodec
from kvq_cli.codecs.uniform import UniformCodec

BATCH, HEADS, HEAD_DIM = 2, 3, 80


def draw(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def codebook(block, heads=HEADS, share=8, entries=256):
    centroids = draw(heads, HEAD_DIM // share, entries, block[0] * block[1]).half()
    return CodebookCodec(centroids, block, HEAD_DIM, draw(heads, HEAD_DIM), draw(heads, HEAD_DIM).abs() + 0.5)


def per_head():
    return PerHeadCodec(
        {"temporal": (codebook((4, 1), heads=2), [2, 0]), "channel": (codebook((1, 4), heads=1), [1])},
        torch.device("cpu"),
    )


def transform(widths, groups, values, gain=True):
    noise = torch.Generator().manual_seed(0)
    return TransformCodec(HEADS, random_transform(widths, groups, HEADS * HEAD_DIM // groups, noise, gain), values)


def joined_layers(groups, dtype="float16"):
    basis = torch.linalg.qr(draw(HEADS * HEAD_DIM, sum(size for size, _ in groups))).Q
    tensors = {"groups": torch.tensor(groups), "basis": basis, "mean": draw(HEADS, HEAD_DIM)}
    return JoinedLayersCodec({**tensors, "spread": torch.ones(HEADS, HEAD_DIM)}, HEADS * HEAD_DIM, dtype, holds=True)


def matrix_rotation(heads=HEADS):
    return MatrixRotation(torch.linalg.qr(draw(heads, HEAD_DIM, HEAD_DIM)).Q, torch.ones(heads, HEAD_DIM))


def one_for_all(entries):
    return CodebookCodec(draw(1, 1, entries, 1), (1, 1), HEAD_DIM)


def large():
    centroids = draw(1, 1, 65536, 8).half()
    return CodebookCodec(centroids, (1, 8), HEAD_DIM, draw(HEADS, HEAD_DIM), draw(HEADS, HEAD_DIM).abs() + 0.5)


def outliers(inner):
    return OutlierCodec(inner, -draw(HEADS, HEAD_DIM).abs(), draw(HEADS, HEAD_DIM).abs(), 0.01, torch.float32)


def fitted(codec):
    """A codec fit to the prompt of one row, used for all rows of a test."""
    return codec.with_state(codec.fit(Prompt(*(draw(1, HEADS, 20, HEAD_DIM) for _ in range(3)))))


CODECS = {
    "identity": IdentityCodec(),
    **{f"uniform {b} {axis}": UniformCodec(b, axis, 16, HEAD_DIM) for b in (2, 3, 8) for axis in ("channel", "token")},
    **{f"codebook {block}": codebook(block) for block in ((1, 1), (4, 1), (8, 1), (1, 4), (2, 2))},
    **{
        f"signed {sign} {hybrid} {axis}": SignedCodec(2, axis, 16, HEAD_DIM, sign=sign, hybrid=hybrid)
        for sign, hybrid in (("extra", "no"), ("extra", "always"), ("extra", "symmetric"), ("inside", "no"))
        for axis in ("channel", "token")
    },
    "normalized": fitted(NormalizedCodec(SignedCodec(2, "token", 16, HEAD_DIM))),
    "subspace": fitted(SubspaceCodec(2, 16, HEAD_DIM, rank=5, strength=0.1, block=24)),
    "codebook of 16": codebook((1, 1), entries=16),
    "codes of 16 bits": large(),
    "transform per head": transform((5, 4, 3, 2, 1, 1), HEADS, values=False),
    "transform per head of values": transform((7, 6, 6, 2, 1), HEADS, values=True),
    "transform without a gain": transform((8, 3), HEADS, values=True, gain=False),
    "transform of all heads": transform((8, 7, 6, 5, 4, 3, 2, 2, 1), 1, values=False),
    "components of all layers": joined_layers([(16, 16), (64, 8), (64, 4), (64, 4), (16, 2)]),
    "components of all layers, in bfloat16": joined_layers([(64, 2), (16, 8)], "bfloat16"),
    "one codebook for all heads": one_for_all(8),
    "per token": PerTokenCodec(one_for_all(4), HEADS, HEAD_DIM, 0, torch.float32),
    "per token with outliers": PerTokenCodec(one_for_all(8), HEADS, HEAD_DIM, 0.02, torch.bfloat16),
    "per head": per_head(),
    "lloyd-max": LloydMaxCodec(3, HEAD_DIM, correct_norm=False),
    "rotated lloyd-max": RotatedCodec(LloydMaxCodec(2, HEAD_DIM), HadamardRotation(HEAD_DIM, flip=True)),
    "rotated uniform": RotatedCodec(UniformCodec(2, "channel", 16, HEAD_DIM), HadamardRotation(HEAD_DIM)),
    **{f"balanced {axis}": BalancedCodec(3, axis, 16, HEAD_DIM, iterations=6) for axis in ("channel", "token")},
    "tokens of equal norm": TokenNormCodec(UniformCodec(2, "channel", 16, HEAD_DIM)),
    **{each.__name__: each(HEAD_DIM) for each in (Q4_0, Q8_0, Int4PerTokenHead, Fp8PerTokenHead)},
    "quanto": QuantoCodec(2, 64, HEAD_DIM),
    "rotated in blocks": RotatedCodec(Q4_0(HEAD_DIM), HadamardRotation(HEAD_DIM, flip=True, block=16)),
    "clipped": ClippedCodec(UniformCodec(2, "token", 16, HEAD_DIM), 0.9),
    "clipped, rotated by one matrix for all heads": RotatedCodec(
        ClippedCodec(UniformCodec(2, "token", 16, HEAD_DIM), 0.9), matrix_rotation(heads=1)
    ),
    "rotated by a matrix": RotatedCodec(UniformCodec(2, "token", 16, HEAD_DIM), matrix_rotation()),
    "outliers on uniform": outliers(UniformCodec(2, "channel", 16, HEAD_DIM)),
    "outliers per head": outliers(per_head()),
    "first channel": FirstChannelCodec(UniformCodec(2, "channel", 16, HEAD_DIM - 1), torch.float32),
}
each_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())


def joined(runs: list[Packed]) -> Packed:
    parts = {
        key: Part(torch.cat([run.parts[key].tensor for run in runs], 2), part.unit)
        for key, part in runs[0].parts.items()
    }
    return Packed(sum(run.tokens for run in runs), parts)


def assert_same(a: Packed, b: Packed) -> None:
    assert a.tokens == b.tokens
    assert a.parts.keys() == b.parts.keys()
    for key, part in a.parts.items():
        assert part.unit == b.parts[key].unit
        assert part.tensor.dtype == b.parts[key].tensor.dtype
        assert torch.equal(part.tensor, b.parts[key].tensor), key


def assert_same_numbers(codec, a: torch.Tensor, b: torch.Tensor) -> None:
    """Bit for bit, but for matrix products, which round differently for other numbers of tokens."""
    products = isinstance(codec, RotatedCodec) and isinstance(codec.rotation, MatrixRotation)
    if products or isinstance(codec, TransformCodec | JoinedLayersCodec):
        torch.testing.assert_close(a, b, rtol=1e-5 if a.dtype == torch.float32 else 1e-2, atol=1e-5)
    else:
        assert torch.equal(a, b)


@each_codec
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_splitting_a_run_changes_no_bit(codec, data):
    blocks = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    seed, batch = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 3))
    tokens = sum(blocks) * codec.block_tokens
    x = torch.randn(batch, HEADS, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(seed)) * 2
    whole = codec.encode(x)
    runs = x.split([n * codec.block_tokens for n in blocks], dim=2)
    assert_same(whole, joined([codec.encode(run) for run in runs]))
    decoded = torch.cat([codec.decode(codec.encode(run), torch.float32) for run in runs], 2)
    assert_same_numbers(codec, codec.decode(whole, torch.float32), decoded)
    one_row = codec.encode(x[-1:])
    for key, part in one_row.parts.items():
        assert torch.equal(part.tensor, whole.parts[key].tensor[-1:])


@each_codec
def test_tile_size_changes_no_bit(codec, monkeypatch):
    x = draw(BATCH, HEADS, 12 * codec.block_tokens, HEAD_DIM)
    whole = codec.encode(x)
    monkeypatch.setattr(base, "TILE", 5 * codec.block_tokens * x[:, :, 0].numel())
    assert_same(whole, codec.encode(x))


@each_codec
def test_number_of_threads_changes_no_bit(codec):
    x = draw(BATCH, HEADS, 4 * codec.block_tokens, HEAD_DIM)
    threads, runs = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            runs.append(codec.encode(x))
    finally:
        torch.set_num_threads(threads)
    assert_same(*runs)


@each_codec
def test_parts_have_their_units_and_decode_from_views(codec):
    """A store returns slices of longer buffers."""
    x = draw(BATCH, HEADS, 6 * codec.block_tokens, HEAD_DIM)
    packed = codec.encode(x)
    for part in packed.parts.values():
        assert part.tensor.shape[2] * part.unit == packed.tokens
        assert codec.block_tokens % part.unit == 0
        assert part.tensor.shape[0] == BATCH
    assert packed.nbytes == sum(p.tensor.untyped_storage().nbytes() for p in packed.parts.values())

    start, end = 2 * codec.block_tokens, 5 * codec.block_tokens
    view = Packed(
        end - start,
        {k: Part(p.tensor[:, :, start // p.unit : end // p.unit], p.unit) for k, p in packed.parts.items()},
    )
    for dtype in (torch.float32, torch.bfloat16):
        decoded = codec.decode(view, dtype)
        assert decoded.dtype == dtype
        assert_same_numbers(codec, decoded, codec.decode(packed, dtype)[:, :, start:end])


@each_codec
def test_layout_is_that_of_the_tensors_held(codec):
    """Names, shapes and dtypes of parts, constants and tables, once a token was packed and read."""
    packed = codec.encode(draw(BATCH, HEADS, 2 * codec.block_tokens, HEAD_DIM).half())
    codec.decode(packed, torch.float32)
    layout = codec.layout(HEADS, HEAD_DIM, "float16")
    parts = {
        name: TensorSpec((BATCH, part.heads, packed.tokens // part.unit, *part.entry), part.dtype)
        for name, part in layout.parts.items()
    }
    assert {name: spec_of(part.tensor) for name, part in packed.parts.items()} == parts
    assert {name: part.unit for name, part in packed.parts.items()} == {n: p.unit for n, p in layout.parts.items()}
    assert {name: spec_of(tensor) for name, tensor in codec.constants().items()} == dict(layout.constants)


@each_codec
def test_decoded_numbers_are_contiguous(codec):
    """Attention over many tokens reads channels as if they were adjacent."""
    packed = codec.encode(draw(BATCH, HEADS, 96, HEAD_DIM))
    for dtype in (torch.float32, torch.float16):
        assert codec.decode(packed, dtype).is_contiguous()


@each_codec
def test_decode_does_not_modify_its_input(codec):
    x = draw(BATCH, HEADS, 2 * codec.block_tokens, HEAD_DIM)
    packed = codec.encode(x)
    first = codec.decode(packed, torch.float32).clone()
    codec.decode(packed, torch.bfloat16)
    assert torch.equal(codec.decode(packed, torch.float32), first)


@each_codec
def test_products_and_weighted_sums_are_those_of_decoded_numbers(codec):
    packed = codec.encode(draw(BATCH, HEADS, 4 * codec.block_tokens, HEAD_DIM))
    x = codec.decode(packed, torch.float32).double()
    queries, weights = draw(BATCH, HEADS, 2, HEAD_DIM), draw(BATCH, HEADS, 2, packed.tokens)
    products = codec.products(queries, packed).double()
    torch.testing.assert_close(products, queries.double() @ x.mT, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(codec.weighted_sum(weights, packed).double(), weights.double() @ x, rtol=1e-4, atol=1e-3)


@each_codec
def test_blocks_of_a_row_that_were_not_written(codec):
    """Attention reads rows of different lengths together: behind a shorter row's tokens a store holds zeros."""
    written, size = draw(BATCH, HEADS, 4 * codec.block_tokens, HEAD_DIM), 2 * codec.block_tokens
    full = codec.encode(written)
    packed = Packed(full.tokens, {name: Part(part.tensor.clone(), part.unit) for name, part in full.parts.items()})
    for part in packed.parts.values():
        part.tensor[0, :, size // part.unit :] = 0
    x = codec.decode(packed, torch.float32)
    weights = draw(BATCH, HEADS, 2, packed.tokens)
    weights[0, ..., size:] = 0
    assert x.isfinite().all()
    assert codec.products(draw(BATCH, HEADS, 2, HEAD_DIM), packed).isfinite().all()
    expected = codec.decode(full, torch.float32)
    assert_same_numbers(codec, x[0, :, :size], expected[0, :, :size])
    assert_same_numbers(codec, x[1:], expected[1:])
    torch.testing.assert_close(
        codec.weighted_sum(weights, packed).double(), weights.double() @ expected.double(), rtol=1e-4, atol=1e-3
    )


@each_codec
def test_numbers_beyond_16_bits_decode_to_finite_ones(codec):
    """An infinite scale, outlier or norm would lose a group, or a row of attention."""
    x = 1e6 * draw(BATCH, HEADS, 4 * codec.block_tokens, HEAD_DIM)
    assert x.abs().max() > 65504
    assert codec.decode(codec.encode(x), torch.float32).isfinite().all()


@each_codec
def test_incomplete_block_is_refused(codec):
    if codec.block_tokens > 1:
        with pytest.raises(ValueError, match="not a whole number of blocks"):
            codec.encode(draw(1, HEADS, codec.block_tokens + 1, HEAD_DIM))


def test_per_head_equals_its_members():
    x, codec = draw(BATCH, HEADS, 8, HEAD_DIM), per_head()
    packed, decoded = codec.encode(x), codec.decode(codec.encode(x), torch.float32)
    temporal, channel = codebook((4, 1), heads=2), codebook((1, 4), heads=1)
    assert torch.equal(decoded[:, [2, 0]], temporal.decode(temporal.encode(x[:, [2, 0]]), torch.float32))
    assert torch.equal(decoded[:, [1]], channel.decode(channel.encode(x[:, [1]]), torch.float32))
    assert packed.nbytes * 4 == x.numel()
    assert set(codec.constants()) >= {"temporal.centroids", "channel.centroids", "channel.mean"}


def test_per_head_requires_every_head_once():
    with pytest.raises(ValueError, match="each kv head"):
        PerHeadCodec({"a": (codebook((4, 1), heads=2), [0, 2])}, torch.device("cpu"))

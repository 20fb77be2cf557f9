"""Transform codes against explicit matrices, and weighted sums against decoded numbers."""

import pytest
import torch
from held_tensors import held_tensors
from hypothesis import given, settings
from hypothesis import strategies as st
from random_transforms import random_transform

from kvq_cli.codecs.base import Packed, Part
from kvq_cli.codecs.chunk_codebooks import CHUNKS
from kvq_cli.codecs.transform import TransformCodec

HEADS, DIM = 3, 8
#: Chunks of 1, 2, 4 and 8 components of each group: of one for all heads, and of one per head.
ALLOCATIONS = {"joined": [[2, 1, 2, 1]], "per head": [[0, 0, 2, 0], [3, 2, 0, 0], [0, 0, 0, 1]]}


def made(name: str, seed: int = 0):
    """A codec and its tensors."""
    rows = ALLOCATIONS[name]
    tensors = random_transform(rows, HEADS * DIM // len(rows), torch.float32, torch.Generator().manual_seed(seed))
    return TransformCodec(HEADS, tensors), tensors


def numbers(tokens: int, batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, HEADS, tokens, DIM, generator=torch.Generator().manual_seed(1)) * 2


def by_hand(x: torch.Tensor, name: str, tensors: dict) -> torch.Tensor:
    """One token `[HEADS, DIM]`: transformed, every chunk replaced by its nearest centroid, transformed back."""
    rows = ALLOCATIONS[name]
    out, used = [], dict.fromkeys(CHUNKS, 0)
    for group, (row, channels) in enumerate(zip(rows, x.double().reshape(len(rows), -1), strict=True)):
        mean, analysis, synthesis = (tensors[key][group].double() for key in ("mean", "analysis", "synthesis"))
        z, kept = analysis @ (channels - mean), []
        for size, chunks in zip(CHUNKS, row, strict=True):
            for _ in range(chunks):
                book = tensors[f"centroids.{size}"][used[size]].double()
                chunk = z[len(kept) : len(kept) + size]
                kept += book[(book - chunk).square().sum(1).argmin()].tolist()
                used[size] += 1
        kept += [0.0] * (len(z) - len(kept))
        out.append(synthesis @ torch.tensor(kept, dtype=torch.float64) + mean)
    return torch.stack(out).view(HEADS, DIM)


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_decoded_numbers_are_those_of_explicit_matrices(name):
    codec, tensors = made(name)
    x = numbers(40)
    packed = codec.encode(x)
    assert packed.parts["codes"].tensor.shape == (2, 1, 40, sum(map(sum, ALLOCATIONS[name])))
    assert codec.nominal_bits == 8 * packed.nbytes / x.numel()
    decoded = codec.decode(packed, torch.float32)
    expected = torch.stack([torch.stack([by_hand(x[b, :, t], name, tensors) for t in range(40)], 1) for b in range(2)])
    # A chunk in the middle of two centroids may get either: at most one in a thousand.
    assert ((decoded - expected).abs().amax(3) < 1e-4).float().mean() > 0.999


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_codes_of_a_token_do_not_depend_on_others(name):
    """Bit for bit, also for numbers far outside of the calibrated range."""
    codec, _ = made(name)
    x = numbers(64)
    x[:, :, 5] *= 1e4
    whole = codec.encode(x).parts["codes"].tensor
    for tokens in (1, 7):
        runs = [codec.encode(run).parts["codes"].tensor for run in x[1:].split(tokens, dim=2)]
        assert torch.equal(torch.cat(runs, dim=2), whole[1:])


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_weighted_sums_are_those_of_decoded_numbers(name):
    codec, _ = made(name)
    packed = codec.encode(numbers(50))
    weights = torch.rand(2, HEADS, 4, 50, generator=torch.Generator().manual_seed(2))
    expected = weights.double() @ codec.decode(packed, torch.float64)
    assert codec.joined == (name == "joined")
    assert torch.allclose(codec.weighted_sum(weights, packed).double(), expected, rtol=1e-4, atol=1e-4)


def test_synthesis_is_stored_once_and_without_dropped_components():
    codec, tensors = made("per head")
    kept = (8, 7, 8)
    assert codec.constants()["synthesis"].numel() == DIM * sum(kept)
    assert torch.equal(codec.constants()["mean"], tensors["mean"])


ALLOCATION = st.lists(st.integers(0, 2), min_size=4, max_size=4)


def fitting(row: list[int], width: int) -> list[int]:
    """The chunks of a row that fit a transform of `width` components, short ones first."""
    fit = []
    for size, chunks in zip(CHUNKS, row, strict=True):
        fit.append(min(chunks, width // size))
        width -= size * fit[-1]
    return fit


def plainly_decoded(codes: torch.Tensor, allocation: list[list[int]], tensors: dict) -> torch.Tensor:
    """S z' + mean in float64, chunk by chunk: codes `[B, 1, T, chunks]` -> `[B, HEADS, T, DIM]`."""
    kept: list[list[torch.Tensor]] = [[] for _ in allocation]
    column = 0
    for place, size in enumerate(CHUNKS):
        chunk = 0
        for group, row in enumerate(allocation):
            for _ in range(row[place]):
                book = tensors[f"centroids.{size}"][chunk].double()
                kept[group].append(book[codes[:, 0, :, column].long()])
                chunk, column = chunk + 1, column + 1
    out = []
    for group, pieces in enumerate(kept):
        x = tensors["mean"][group].double().expand(*codes.shape[::2], -1)
        if pieces:
            z = torch.cat(pieces, dim=-1)
            x = x + z @ tensors["synthesis"][group, :, : z.shape[-1]].double().T
        out.append(x)
    batch, _, tokens, _ = codes.shape
    return torch.cat(out, dim=-1).view(batch, tokens, HEADS, DIM).transpose(1, 2)


@settings(max_examples=40, deadline=None)
@given(
    joined=st.booleans(),
    rows=st.lists(ALLOCATION, min_size=HEADS, max_size=HEADS),
    tokens=st.sampled_from((1, 2, 7, 33)),
    batch=st.integers(1, 3),
    dtype=st.sampled_from((torch.float32, torch.float16, torch.bfloat16)),
)
def test_any_codes_decode_as_by_a_lookup_per_chunk(joined, rows, tokens, batch, dtype):
    """Any allocation, also groups without a chunk, of numbers that any codes stand for."""
    width = HEADS * DIM if joined else DIM
    allocation = [fitting(row, width) for row in rows[: 1 if joined else HEADS]]
    if not any(map(any, allocation)):
        allocation[-1] = [1, 0, 0, 0]
    noise = torch.Generator().manual_seed(0)
    tensors = random_transform(allocation, width, dtype, noise)
    codec = TransformCodec(HEADS, tensors)
    codes = torch.randint(0, 256, (batch, 1, tokens, sum(map(sum, allocation))), generator=noise, dtype=torch.uint8)
    packed, expected = Packed(tokens, {"codes": Part(codes, 1)}), plainly_decoded(codes, allocation, tensors)
    close = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(codec.decode(packed, torch.float32).double(), expected, **close)
    torch.testing.assert_close(codec.decode_by_channel(packed).double(), expected.mT, **close)
    weights = torch.rand(batch, HEADS, 2, tokens, generator=noise)
    weights /= weights.sum(dim=-1, keepdim=True)
    torch.testing.assert_close(codec.weighted_sum(weights, packed).double(), weights.double() @ expected, **close)


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_constants_are_the_tensors_held(name):
    codec, _ = made(name)
    codec.decode(codec.encode(numbers(3)), torch.float32)
    found, counted = held_tensors(codec), codec.constants().values()
    assert sum(found.values()) == sum(x.nbytes for x in counted)
    assert {x.untyped_storage().data_ptr() for x in counted} <= set(found)

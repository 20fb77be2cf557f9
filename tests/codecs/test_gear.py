"""GEAR against its equations in float64: outliers, groups, and the power iteration as the paper writes it."""

import numpy as np
import pytest
import torch
from pairwise import parametrize_pairwise

from kvq_cli.codecs.base import Codec, Packed, Part, Prompt
from kvq_cli.codecs.gear import GearCodec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.errors import UsageError

DIM, GROUP, CHUNK = 64, 32, 64
SIDES = {"keys": "channel", "values": "token"}


def codec(side="keys", bits=2, fraction=0.02, rank=4, chunk_rank=2, loops=3, seed=0) -> GearCodec:
    base = UniformCodec(bits, SIDES[side], GROUP, DIM, torch.float32)
    return GearCodec(base, CHUNK, fraction, rank, chunk_rank, loops, seed)


def packed_prompt(one: GearCodec, prompt: Prompt) -> tuple[Packed, dict, torch.Tensor]:
    """(packed, state, decoded) of the whole prompt."""
    packed, state = one.encode_prompt(prompt.keys if one.base.axis == "channel" else prompt.values, prompt, 0)
    return packed, state, one.with_state(state).decode(packed, torch.float32)


def later(one: GearCodec) -> Codec:
    """The codec of later tokens after a prompt without packed tokens."""
    return one.with_state({})


def quantized(x: np.ndarray, kept: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """D of groups of 32 along the axis, outliers left out of their range; scale and zero as kept in 16 bits."""
    groups, outliers = (np.moveaxis(y, axis, 1).reshape(x.shape[1 - axis], -1, GROUP) for y in (x, kept))
    low = np.where(outliers, np.inf, groups).min(-1, keepdims=True)
    high = np.where(outliers, -np.inf, groups).max(-1, keepdims=True)
    scale = ((high - low).astype(np.float32) / (2**bits - 1)).astype(np.float16).astype(np.float64)
    zero = low.astype(np.float16).astype(np.float64)
    codes = np.clip(np.rint((groups - zero) / scale), 0, 2**bits - 1)
    return np.moveaxis((codes * scale + zero).reshape(x.shape[1 - axis], -1), 1, axis)


def sparse(x: np.ndarray, each: int) -> np.ndarray:
    """Which numbers of chunks `[tokens, channels]` are outliers."""
    kept = np.zeros(x.shape, bool)
    for start in range(0, len(x), CHUNK):
        order = x[start : start + CHUNK].reshape(-1).argsort(kind="stable")
        kept[start : start + CHUNK].reshape(-1)[np.r_[order[:each], order[len(order) - each :]]] = True
    return kept


def low_rank(error: np.ndarray, rank: int, loops: int, seed: int) -> np.ndarray:
    """The paper's SVDSolver, A <- E B, B <- E^T A, with its last factor made orthonormal: what lies along it."""
    start = torch.randn(DIM, rank, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    right = start.numpy()
    for _ in range(loops):
        left = np.linalg.qr(error @ right)[0]
        right = error.T @ left
    basis = np.linalg.qr(right)[0]
    return error @ basis @ basis.T


def expected(x: torch.Tensor, side: str, bits: int, fraction: float, rank: int, chunks: bool) -> np.ndarray:
    out = np.empty(x.shape)
    for row, head in np.ndindex(*x.shape[:2]):
        one = x[row, head].double().numpy()
        kept = sparse(one, int(fraction / 2 * CHUNK * DIM))
        dense = quantized(one, kept, bits, 0 if side == "keys" else 1)
        error = np.where(kept, 0, one - dense)
        size = CHUNK if chunks else len(one)
        pieces = [low_rank(error[i : i + size], rank, 3, 0) for i in range(0, len(one), size)]
        out[row, head] = np.where(kept, one, dense + np.concatenate(pieces))
    return out


@parametrize_pairwise(
    {"kind": ["random", "captured"], "side": SIDES, "bits, fraction": [(2, 0.02), (3, 0.1), (4, 0.0)]}
)
def test_equals_the_definition_in_float64(prompts, kind, side, bits, fraction):
    prompt, one = prompts[kind], codec(side, bits, fraction)
    x = getattr(prompt, side)
    chunks_decoded = later(one).decode(later(one).encode(x), torch.float32)
    for actual, rank, chunks in ((packed_prompt(one, prompt)[2], 4, False), (chunks_decoded, 2, True)):
        off = np.abs(actual.double().numpy() - expected(x, side, bits, fraction, rank, chunks))
        # Where rounding flips a code, the factors of its chunk move a little.
        assert np.quantile(off, 0.99) < 2e-3 * x.abs().max().item()
        assert off.max() < 0.1 * x.abs().max().item()


@pytest.mark.parametrize("kind", ["random", "captured"])
@pytest.mark.parametrize("side", SIDES)
def test_error_falls_with_rank_and_full_rank_is_exact(prompts, kind, side):
    prompt = prompts[kind]
    x = getattr(prompt, side)
    for whole in (True, False):
        errors = []
        for rank in (0, 1, 2, 4, 8, 16, 32, DIM):
            one = codec(side, fraction=0.0, rank=rank, chunk_rank=rank)
            decoded = packed_prompt(one, prompt)[2] if whole else later(one).decode(later(one).encode(x), torch.float32)
            errors.append(((decoded - x).norm() / x.norm()).item())
        assert errors == sorted(errors, reverse=True)
        assert errors[0] > 0.1 and errors[-1] < 1e-3


def test_power_iteration_is_close_to_the_truncated_svd(prompts):
    prompt, one = prompts["captured"], codec(fraction=0.0)
    x, base = prompt.keys, codec(fraction=0.0, rank=0)
    error = (x - packed_prompt(base, prompt)[2]).double()
    best = torch.linalg.svdvals(error)[..., 4:].square().sum(-1).sqrt()
    found = (x - packed_prompt(one, prompt)[2]).double().flatten(2).norm(dim=2)
    assert (found >= best * 0.999).all() and (found < best * 1.05).all()


def test_outliers_are_the_extremes_and_decode_exactly(prompts):
    x, one = prompts["captured"].values, codec("values", fraction=0.05)
    packed = later(one).encode(x)
    decoded = later(one).decode(packed, torch.float32).unflatten(2, (-1, CHUNK)).flatten(3)
    numbers, places = x.unflatten(2, (-1, CHUNK)).flatten(3), packed.parts["outlier_index"].tensor.long()
    each = int(0.025 * CHUNK * DIM)
    assert places.shape[3] == 2 * each
    assert torch.equal(decoded.gather(3, places), numbers.gather(3, places).half().float())
    kept = numbers.gather(3, places).sort(dim=3).values
    assert torch.equal(kept[..., :each], numbers.sort(dim=3).values[..., :each])
    assert torch.equal(kept[..., each:], numbers.sort(dim=3).values[..., -each:])


def test_more_outliers_or_rank_lower_the_error_of_real_keys_and_values(prompts):
    for side in SIDES:
        x = getattr(prompts["captured"], side)

        def error(**options):
            return (packed_prompt(codec(side, **options), prompts["captured"])[2] - x).norm().item()  # noqa: B023

        assert error() < error(rank=0) < error(rank=0, fraction=0.0)
        assert error() < error(fraction=0.0)
        assert error(fraction=0.1) < error()
        assert error(bits=4) < error(bits=3) < error(bits=2) < error(bits=1)


def test_equal_numbers_give_no_nan_and_are_exact():
    x = torch.full((1, 2, 2 * CHUNK, DIM), 0.5)
    x[:, 1] = 0
    one = codec(fraction=0.02)
    assert torch.equal(packed_prompt(one, Prompt(x, x, x))[2], x)
    assert torch.equal(later(one).decode(later(one).encode(x), torch.float32), x)


@pytest.mark.parametrize("side", SIDES)
def test_numbers_beyond_16_bits_decode_to_finite_ones(prompts, side):
    large = Prompt(*(1e6 * x for x in (prompts["random"].keys, prompts["random"].values, prompts["random"].queries)))
    one = codec(side)
    assert packed_prompt(one, large)[2].isfinite().all()
    assert later(one).decode(later(one).encode(large.keys), torch.float32).isfinite().all()


@pytest.mark.parametrize("side", SIDES)
def test_bytes_of_codes_factors_and_outliers(prompts, side):
    x = getattr(prompts["random"], side)
    one, chunks = codec(side), x.shape[2] // CHUNK
    heads, numbers = 2 * 2, x.numel()
    shared = numbers * 3 // 8 + heads * chunks * 4 * 2 * int(0.01 * CHUNK * DIM)
    packed, state, _ = packed_prompt(one, prompts["random"])
    assert packed.nbytes == shared + heads * x.shape[2] * 4 * 2
    assert {name: (tuple(t.shape), t.dtype) for name, t in state.items()} == {"right": ((2, 2, 4, DIM), torch.float16)}
    assert later(one).encode(x).nbytes == shared + heads * (x.shape[2] + chunks * DIM) * 2 * 2


@pytest.mark.parametrize("side", SIDES)
def test_chunks_are_independent_and_prompt_tiles_decode_alone(prompts, side):
    x, one = getattr(prompts["captured"], side), codec(side)
    whole, pieces = later(one).encode(x), [later(one).encode(part) for part in x.split(CHUNK, dim=2)]
    for name, part in whole.parts.items():
        assert torch.equal(part.tensor, torch.cat([piece.parts[name].tensor for piece in pieces], dim=2))
    alone = later(one).encode(x[1:])
    assert all(torch.equal(part.tensor, whole.parts[name].tensor[1:]) for name, part in alone.parts.items())
    packed, state, decoded = packed_prompt(one, prompts["captured"])
    for start in range(0, x.shape[2], CHUNK):
        cut = {
            k: Part(p.tensor[:, :, start // p.unit : (start + CHUNK) // p.unit], p.unit)
            for k, p in packed.parts.items()
        }
        tile = one.with_state(state).decode(Packed(CHUNK, cut), torch.float32)
        torch.testing.assert_close(tile, decoded[:, :, start : start + CHUNK], rtol=1e-6, atol=1e-6)


def test_factors_depend_on_the_seed(prompts):
    first, again, other = (packed_prompt(codec(seed=seed), prompts["random"]) for seed in (0, 0, 1))
    assert torch.equal(first[1]["right"], again[1]["right"])
    assert not torch.equal(first[1]["right"], other[1]["right"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 65}, "rank=65.*head_dim of 64 has no higher rank"),
        ({"chunk_rank": 65}, "chunk_rank=65"),
        ({"fraction": 1e-4}, "outliers=0.0001 of 64 by 64 numbers keeps none"),
    ],
)
def test_invalid_options_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        codec(**options)


def test_chunks_beyond_16_bit_indices_are_refused():
    with pytest.raises(UsageError, match="residual=1024: at head_dim=64 a chunk may have at most 512 tokens"):
        GearCodec(UniformCodec(2, "channel", GROUP, DIM), 1024, 0.02, 4, 2, 3, 0)

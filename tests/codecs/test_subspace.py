"""SQuat's keys against direct solves in float64: Eq. 2, Lemma 3, and the SVD of the queries."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvq_cli.codecs import gram
from kvq_cli.codecs.base import Prompt
from kvq_cli.codecs.subspace import SubspaceCodec
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.errors import UsageError

GROUP = 8


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(dim=16, rows=2, heads=2, sharing=2, tokens=40, seed=0, **options):
    """(prompt, codec, the codec with the state fit to the prompt, that state)."""
    options = {"rank": 3, "strength": 0.05, "block": 8, **options}
    codec = SubspaceCodec(2, GROUP, dim, torch.float32, **options)
    queries = numbers(rows, heads * sharing, tokens, dim, seed=seed) * torch.linspace(3, 0.1, dim)
    prompt = Prompt(numbers(rows, heads, tokens, dim, seed=seed + 1), numbers(rows, heads, tokens, dim), queries)
    state = codec.fit(prompt)
    return prompt, codec, codec.with_state(state), state


@pytest.mark.parametrize("dim", [64, 80, 96])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_strength_0_equals_the_uniform_codec_bit_for_bit(bits, dim):
    x = numbers(2, 2, 64, dim).to(torch.bfloat16)
    codec = SubspaceCodec(bits, 32, dim, torch.bfloat16, rank=5, strength=0.0, block=24)
    codec = codec.with_state(codec.fit(Prompt(x, x, numbers(2, 4, 64, dim))))
    plain = UniformCodec(bits, "channel", 32, dim, torch.bfloat16)
    expected, actual = plain.encode(x), codec.encode(x)
    assert expected.parts.keys() == actual.parts.keys()
    for name, part in expected.parts.items():
        assert torch.equal(part.tensor, actual.parts[name].tensor), name
    assert torch.equal(codec.decode(actual, torch.float32), plain.decode(expected, torch.float32))


@pytest.mark.parametrize("tokens", [1, 2, 40])
def test_subspace_is_the_svd_of_the_query_heads_of_a_kv_head(tokens):
    """Q^T Q is compared, since signs of singular vectors are arbitrary. A short prompt has a lower rank."""
    prompt, _, _, state = made(tokens=tokens)
    queries = prompt.queries.double().numpy()
    for row in range(2):
        for head in range(2):
            whole = np.concatenate([queries[row, 2 * head], queries[row, 2 * head + 1]])
            _, s, v = np.linalg.svd(whole, full_matrices=False)
            own = s[:3, None] * v[:3]
            found = state["subspace"][row, head].double().numpy()
            np.testing.assert_allclose(found.T @ found, own.T @ own, rtol=1e-5, atol=1e-4)


def test_long_prompts_are_summed_in_tiles(monkeypatch):
    prompt, codec, _, whole = made(tokens=40)
    queries = prompt.queries.unflatten(1, (2, -1)).flatten(2, 3).double()
    assert torch.equal(gram.gram_matrix(queries), queries.mT @ queries)  # within a tile: one product
    monkeypatch.setattr(gram, "TILE", 7 * 2 * 2 * 16)
    assert [tile.shape[2] for tile in gram.token_tiles(queries)] == [7] * 11 + [3]
    for name, state in codec.fit(prompt).items():
        torch.testing.assert_close(state.mT @ state, whole[name].mT @ whole[name], rtol=1e-5, atol=1e-5)


def reference(keys: np.ndarray, subspace: np.ndarray, strength: float, block: int, quantize) -> np.ndarray:
    """Algorithm 1 for the tokens `[tokens, dim]` of one head, with the paper's own matrices: A_t^-1 by Lemma 3 and the
    update of Lemma 2. `quantize(columns)` gives the decoded numbers."""
    k, dim = keys.copy(), keys.shape[1]
    cuts = [*range(block, dim, block)]
    inverse = np.eye(dim) + strength * subspace.T @ subspace  # A_T^-1
    whole = np.linalg.inv(inverse)  # P_inv
    inverses = {}
    for cut in reversed(cuts):
        m, n, o = inverse[:cut, :cut], inverse[cut:, :cut], inverse[cut:, cut:]
        inverse = m - n.T @ np.linalg.inv(o) @ n
        inverses[cut] = inverse
    for start, cut in zip([0, *cuts], [*cuts, dim], strict=True):
        error = quantize(k[:, start:cut]) - k[:, start:cut]
        k[:, start:cut] += error
        if cut < dim:
            k[:, cut:] += error @ (whole[cut:, :cut] @ inverses[cut][:, start:cut]).T
    return k


def per_channel(columns: np.ndarray) -> np.ndarray:
    """2-bit asymmetric groups of GROUP tokens; scale and zero-point in 16 bits."""
    groups = columns.reshape(-1, GROUP, columns.shape[1])
    zero = groups.min(1, keepdims=True).astype(np.float16).astype(np.float64)
    scale = ((groups.max(1, keepdims=True) - groups.min(1, keepdims=True)) / 3).astype(np.float16).astype(np.float64)
    return (np.clip(np.rint((groups - zero) / scale), 0, 3) * scale + zero).reshape(columns.shape)


@pytest.mark.parametrize(("dim", "block"), [(16, 8), (16, 4), (16, 1), (20, 8), (80, 40)])
def test_codec_equals_algorithm_1_in_float64(dim, block):
    prompt, codec, bound, state = made(dim=dim, block=block)
    decoded = bound.decode(bound.encode(prompt.keys), torch.float32).double().numpy()
    far = 0
    for row in range(2):
        for head in range(2):
            keys, subspace = (x[row, head].double().numpy() for x in (prompt.keys, state["subspace"]))
            expected = reference(keys, subspace, codec.strength, block, per_channel)
            # A number in the middle between two levels may be rounded to the other one, and moves those after it.
            far += (np.abs(decoded[row, head] - expected).max(1) > 1e-4).sum()
    assert far <= 2 * GROUP


@settings(max_examples=20)
@given(st.integers(0, 99), st.sampled_from([1e-3, 0.1, 10.0]), st.integers(1, 16), st.sampled_from([3, 8, 15]))
def test_update_solves_equation_2(seed, strength, rank, cut):
    """min |d|^2 + strength |Q d|^2 with the block's error given: least squares over the later channels."""
    _, codec, bound, state = made(seed=seed, rows=1, heads=1, rank=rank, strength=strength, block=cut)
    subspace = state["subspace"][0, 0].double().numpy()
    error = numbers(5, cut, seed=seed).double().numpy()
    gain = state["gain"][0, 0, 0].double().numpy()
    moved = -error @ subspace[:, :cut].T @ gain @ subspace[:, cut:]
    whole = np.concatenate([np.eye(16), strength**0.5 * subspace])
    direct = np.linalg.lstsq(whole[:, cut:], -whole[:, :cut] @ error.T, rcond=None)[0].T
    np.testing.assert_allclose(moved, direct, rtol=1e-3, atol=1e-4 * np.abs(direct).max())


def test_errors_in_the_subspace_are_smaller():
    prompt, _, bound, state = made(dim=64, block=16, strength=1.0)
    plain = UniformCodec(2, "channel", GROUP, 64, torch.float32)
    inside = [
        ((codec.decode(codec.encode(prompt.keys), torch.float32) - prompt.keys) @ state["subspace"].mT).square().mean()
        for codec in (plain, bound)
    ]
    assert inside[1] < 0.5 * inside[0]


def test_shared_subspace_serves_all_rows():
    prompt, _, _, _ = made()
    codec = SubspaceCodec(2, GROUP, 16, torch.float32, rank=3, strength=0.05, block=8, shared=True)
    first = Prompt(prompt.keys[:1], prompt.values[:1], prompt.queries[:1])
    bound = codec.with_state(codec.fit(first))
    assert codec.shares_state
    for row in range(2):
        own = bound.encode(prompt.keys[row : row + 1])
        for name, part in bound.encode(prompt.keys).parts.items():
            assert torch.equal(part.tensor[row : row + 1], own.parts[name].tensor)


@pytest.mark.parametrize("block", [16, 64])
def test_block_without_later_channels_is_refused(block):
    with pytest.raises(UsageError, match=f"block={block}: at head_dim=16 no channels are left .* fewer than 16"):
        SubspaceCodec(2, GROUP, 16, rank=3, strength=0.1, block=block)

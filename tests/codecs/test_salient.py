"""ZipCache against its equations in float64: saliency, choice of tokens, quantization at both bit widths."""

import numpy as np
import pytest
import torch
from pairwise import parametrize_pairwise

from kvq_cli.codecs import salient
from kvq_cli.codecs.base import Packed, Part, Prompt
from kvq_cli.codecs.salient import SalientCodec, attention_received, prompt_saliency
from kvq_cli.codecs.uniform import UniformCodec
from kvq_cli.errors import UsageError

DIM, CHUNK, TOKENS = 64, 50, 250
SIDES = ("keys", "values")


def codec(side="keys", low=2, high=4, ratio=0.4, seed=0) -> SalientCodec:
    return SalientCodec(side, low, high, ratio, CHUNK, DIM, torch.float32, seed)


def packed_prompt(one: SalientCodec, prompt: Prompt) -> tuple[Packed, dict, torch.Tensor]:
    """(packed, state, decoded) of the prompt's first `TOKENS` tokens."""
    packed, state = one.encode_prompt(getattr(prompt, one.side)[:, :, :TOKENS], prompt, 0)
    return packed, state, one.with_state(state).decode(packed, torch.float32)


def marked(packed: Packed) -> torch.Tensor:
    """Which tokens are salient, `[rows, heads, tokens]`: bit 4 b + i of a chunk's words, least first."""
    words = packed.parts["salient"].tensor
    # One bit per number: number c sits in word c % W at bit c // W.
    number = torch.arange(CHUNK)
    bits = words[..., number % words.shape[3]] >> (number // words.shape[3])
    return (bits & 1).bool().flatten(2)


def received(prompt: Prompt, probes: list[int]) -> np.ndarray:
    """Mean attention that each token receives from the probes that see it; float64, one query head at a time."""
    queries, keys = prompt.queries.double().numpy(), prompt.keys.double().numpy()
    rows, heads, tokens, dim = keys.shape
    group = queries.shape[1] // heads
    total = np.zeros((rows, heads, tokens))
    for row, head, probe in np.ndindex(rows, queries.shape[1], len(probes)):
        query = probes[probe]
        scores = keys[row, head // group, : query + 1] @ queries[row, head, query] / np.sqrt(dim)
        weights = np.exp(scores - scores.max())
        total[row, head // group, : query + 1] += weights / weights.sum()
    return total / np.array([sum(probe >= token for probe in probes) for token in range(tokens)])


@pytest.mark.parametrize("kind", ["random", "captured"])
def test_saliency_is_the_mean_attention_of_the_probes_that_see_a_token(prompts, kind):
    found = prompt_saliency(prompts[kind], 7)
    tokens = found.shape[2]
    count = int(0.05 * tokens)
    drawn = torch.randperm(tokens - count, generator=torch.Generator().manual_seed(7))[:count].tolist()
    expected = received(prompts[kind], [*drawn, *range(tokens - count, tokens)])
    np.testing.assert_allclose(found.double().numpy(), expected, rtol=1e-3, atol=1e-6)


def test_saliency_with_all_queries_is_the_column_mean_of_causal_attention(prompts, monkeypatch):
    prompt = Prompt(
        *(x[:1, :2, :60] for x in (prompts["random"].keys, prompts["random"].values, prompts["random"].queries))
    )
    monkeypatch.setattr(salient, "PROBES", 0.5)
    scores = prompt.queries.double() @ prompt.keys.double().mT / 8
    causal = torch.ones(60, 60).tril().bool()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    expected = weights.sum(2) / causal.sum(0)
    torch.testing.assert_close(prompt_saliency(prompt, 0).double(), expected, rtol=1e-4, atol=1e-6)


def test_single_token_of_a_prompt_is_salient(prompts):
    one = Prompt(*(x[:, :, :1] for x in (prompts["random"].keys, prompts["random"].values, prompts["random"].queries)))
    assert torch.equal(prompt_saliency(one, 0), torch.full((2, 2, 1), 2.0))  # of two query heads, all of it


def quantized(groups: np.ndarray, bits: int) -> np.ndarray:
    """Groups along the last axis; scale and zero-point in 16 bits."""
    low, high = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    scale = ((high - low).astype(np.float32) / (2**bits - 1)).astype(np.float16).astype(np.float64)
    zero = low.astype(np.float16).astype(np.float64)
    return np.clip(np.rint((groups - zero) / scale), 0, 2**bits - 1) * scale + zero


def expected(x: np.ndarray, chosen: np.ndarray, side: str, low: int, high: int) -> np.ndarray:
    """One chunk of one head, `[tokens, channels]`, `chosen` of its tokens salient."""
    out, norm = np.empty_like(x), np.ones(DIM)
    if side == "values":
        norm = np.sqrt(np.abs(x).max(0)).astype(np.float16).astype(np.float64)
    for bits, which in ((high, chosen), (low, ~chosen)):
        own = (x / norm)[which]
        out[which] = quantized(own, bits) if side == "values" else quantized(own.T, bits).T
    return out * norm


@parametrize_pairwise(
    {"kind": ["random", "captured"], "side": SIDES, "low, high": [(1, 2), (2, 4), (3, 4), (4, 8), (2, 3)]}
)
def test_codec_equals_the_definition_in_float64(prompts, kind, side, low, high):
    prompt, one = prompts[kind], codec(side, low, high)
    x = getattr(prompt, side)[:, :, :TOKENS]
    packed, _, decoded = packed_prompt(one, prompt)
    saliency = prompt_saliency(prompt, 0)[:, :, :TOKENS]
    later = one.with_state({}, saliency).encode(x)
    both = ((packed, decoded, TOKENS), (later, one.with_state({}).decode(later, torch.float32), CHUNK))
    for held, actual, size in both:
        chosen = marked(held)
        for row, head in np.ndindex(2, 2):
            for start in range(0, TOKENS, size):
                part = slice(start, start + size)
                own, weight = chosen[row, head, part], saliency[row, head, part]
                assert own.sum() == round(0.4 * size)
                assert weight[own].min() >= weight[~own].max()
                reference = expected(x[row, head, part].double().numpy(), own.numpy(), side, low, high)
                off = np.abs(actual[row, head, part].double().numpy() - reference)
                step = x.abs().max().item() * 2 / (2**low - 1)
                assert np.quantile(off, 0.99) < 1e-3 * x.abs().max() and off.max() < 1.1 * step


@pytest.mark.parametrize("side", SIDES)
def test_numbers_beyond_16_bits_decode_to_finite_ones(prompts, side):
    """Values' norm is a square root: 1e12 is the first power of ten whose root is beyond 16 bits."""
    random, scale = prompts["random"], {"keys": 1e6, "values": 1e12}[side]
    large = Prompt(scale * random.keys, scale * random.values, random.queries)
    assert packed_prompt(codec(side), large)[2].isfinite().all()


@pytest.mark.parametrize("kind", ["random", "captured"])
@pytest.mark.parametrize(("ratio", "bits"), [(0.0, 2), (1.0, 4)])
def test_ratio_0_and_1_equal_the_uniform_codec(prompts, kind, ratio, bits):
    for side in SIDES:
        x = getattr(prompts[kind], side)[:, :, :TOKENS]
        for size, whole in ((TOKENS, True), (CHUNK, False)):
            one = codec(side, ratio=ratio)
            later = one.with_state({}, torch.rand(2, 2, TOKENS)).encode(x)
            actual = packed_prompt(one, prompts[kind])[2] if whole else one.with_state({}).decode(later, torch.float32)
            norm = torch.ones(2, 2, TOKENS // size, 1, DIM)
            if side == "values":
                norm = x.unflatten(2, (-1, size)).abs().amax(3, keepdim=True).sqrt().half().float()
            axis, group = ("channel", size) if side == "keys" else ("token", DIM)
            uniform = UniformCodec(bits, axis, group, DIM, torch.float32)
            scaled = (x.unflatten(2, (-1, size)) / norm).flatten(2, 3)
            exact = uniform.decode(uniform.encode(scaled), torch.float32).unflatten(2, (-1, size)) * norm
            assert torch.equal(actual, exact.flatten(2, 3))


@pytest.mark.parametrize("side", SIDES)
def test_bytes_are_minimal(prompts, side):
    heads, tokens = 2 * 2, 2 * 2 * TOKENS
    one, chunks = codec(side), TOKENS // CHUNK
    packed, state, _ = packed_prompt(one, prompts["random"])
    codes = tokens * DIM * 2 // 8 + tokens * 2 // 5 * DIM * 2 // 8  # 2 bits each, 2 more for two of five
    marks = heads * chunks * 2 * 4  # 50 bits in two words
    scales = 2 * 2 * (tokens if side == "values" else heads * 2 * DIM)
    norms = heads * DIM * 2 if side == "values" else 0
    counts = heads * chunks * 4
    assert packed.nbytes + sum(t.nbytes for t in state.values()) == codes + marks + scales + norms + counts
    later = one.with_state({}, torch.rand(2, 2, TOKENS)).encode(getattr(prompts["random"], side)[:, :, :TOKENS])
    assert later.nbytes == codes + marks + (scales + norms * chunks if side == "values" else scales * chunks)
    assert one.nominal_bits == 2.8


@pytest.mark.parametrize("side", SIDES)
def test_salient_tokens_have_the_smaller_error(prompts, side):
    x = getattr(prompts["captured"], side)[:, :, :TOKENS]
    packed, _, decoded = packed_prompt(codec(side), prompts["captured"])
    error, chosen = (decoded - x).square().mean(3), marked(packed)
    assert error[chosen].mean() < 0.2 * error[~chosen].mean()

    def total(**options):
        return (packed_prompt(codec(side, **options), prompts["captured"])[2] - x).norm()

    assert total(ratio=1.0) < total(ratio=0.7) < total() < total(ratio=0.0)
    assert total(low=4, high=8) < total(low=3, high=4) < total() < total(low=1, high=2)


@pytest.mark.parametrize("side", SIDES)
def test_chunks_are_independent_and_prompt_tiles_decode_alone(prompts, side):
    prompt, one = prompts["captured"], codec(side)
    x, saliency = getattr(prompt, side)[:, :, :TOKENS], prompt_saliency(prompt, 0)[:, :, :TOKENS]
    whole = one.with_state({}, saliency).encode(x)
    pieces = [
        one.with_state({}, weights).encode(part)
        for part, weights in zip(x.split(CHUNK, 2), saliency.split(CHUNK, 2), strict=True)
    ]
    for name, part in whole.parts.items():
        assert torch.equal(part.tensor, torch.cat([piece.parts[name].tensor for piece in pieces], dim=2))
    packed, state, decoded = packed_prompt(one, prompt)
    for start in range(0, TOKENS, CHUNK):
        stop = start + CHUNK
        cut = {name: Part(p.tensor[:, :, start // p.unit : stop // p.unit], p.unit) for name, p in packed.parts.items()}
        assert torch.equal(one.with_state(state).decode(Packed(CHUNK, cut), torch.float32), decoded[:, :, start:stop])


def test_saliency_of_later_chunks_is_attention_within_the_chunk():
    query, keys = torch.randn(1, 4, 1, DIM), torch.randn(1, 2, CHUNK, DIM)
    weights = (query[0, :, 0].double().unflatten(0, (2, 2)) @ keys[0].double().mT / 8).softmax(-1).sum(1)
    torch.testing.assert_close(attention_received(query, keys)[0].double(), weights, rtol=1e-4, atol=1e-6)


def test_constant_numbers_are_exact():
    x = torch.full((1, 2, 300, DIM), 0.25)
    x[:, 1] = 0
    for side in SIDES:
        assert torch.equal(packed_prompt(codec(side), Prompt(x, x, x))[2], x[:, :, :TOKENS])


def test_unpackable_bit_differences_are_refused():
    with pytest.raises(UsageError, match="bits=1 beside high=8: the difference"):
        codec(low=1, high=8)


def test_attention_saliency_beats_its_inverse(prompts, monkeypatch):
    """In the error of the attention output on real keys and values, for the second half of the prompt's queries."""
    prompt = prompts["captured"]
    queries = prompt.queries[:, :, TOKENS // 2 : TOKENS]

    def output(keys, values):
        hidden = torch.ones(TOKENS, TOKENS).triu(1).bool()[TOKENS // 2 :]
        scores = queries.unflatten(1, (keys.shape[1], -1)) @ keys[:, :, :TOKENS].mT.unsqueeze(2) / 8
        return scores.masked_fill_(hidden, -torch.inf).softmax(-1) @ values[:, :, :TOKENS].unsqueeze(2)

    def error():
        return (
            output(*(packed_prompt(codec(side), prompt)[2] for side in SIDES)) - output(prompt.keys, prompt.values)
        ).norm()

    chosen = error()
    monkeypatch.setattr(salient, "prompt_saliency", lambda *a: -prompt_saliency(*a))
    assert chosen < 0.9 * error()

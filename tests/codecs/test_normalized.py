"""Per-channel normalization fit to the prompt (InnerQ, section 4.3)."""

import torch

from kvq_cli.codecs.base import Prompt
from kvq_cli.codecs.identity import IdentityCodec
from kvq_cli.codecs.normalized import NormalizedCodec
from kvq_cli.codecs.signed import SignedCodec


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_norm_is_the_square_root_of_the_maximum_in_the_prompt():
    keys = numbers(3, 2, 40, 64) * 5
    keys[1, 0, :, 7] = 0
    norm = NormalizedCodec(IdentityCodec()).fit(Prompt(keys, keys, keys))["norm"]
    for row in range(3):
        for head in range(2):
            for channel in range(64):
                top = max(abs(float(k)) for k in keys[row, head, :, channel])
                assert abs(norm[row, head, channel].item() - (top**0.5 if top else 1.0)) < 1e-6


def test_scores_with_the_norm_in_the_query_are_unchanged():
    """(q norm) . (K / norm) = q . K, for prompt tokens and later ones."""
    keys, query = numbers(2, 2, 30, 64), numbers(2, 2, 5, 64, seed=1)
    codec = NormalizedCodec(IdentityCodec())
    state = codec.fit(Prompt(keys[:, :, :20], keys, keys))
    codec = codec.with_state(state)
    packed = codec.encode(keys)
    folded = (query.double() * state["norm"].unsqueeze(2)) @ packed.parts["raw"].tensor.double().mT
    expected = query.double() @ keys.double().mT
    torch.testing.assert_close(folded, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(query @ codec.decode(packed, torch.float32).mT, expected.float(), rtol=1e-5, atol=1e-5)


def test_norm_lowers_the_error_beside_a_large_channel():
    keys = numbers(1, 1, 64, 64)
    keys[..., 5] *= 50
    errors = []
    base = SignedCodec(2, "token", 32, 64)
    normalized = NormalizedCodec(base)
    for codec in (base, normalized.with_state(normalized.fit(Prompt(keys, keys, keys)))):
        error = (codec.decode(codec.encode(keys), torch.float32) - keys)[..., :5]
        errors.append(error.square().mean().item())
    assert errors[1] < 0.5 * errors[0]

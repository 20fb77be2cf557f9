"""Divergence of predictions, against token-by-token decoding and distributions in float64."""

import math

import pytest
import torch

from kvq_cli.attention.attach import attach
from kvq_cli.methods.fp16 import Fp16
from kvq_cli.methods.innerq import InnerQ
from kvq_cli.methods.kivi import Kivi
from kvq_cli.methods.squat import Squat
from kvq_cli.papers.studies.predictions import predictions

WINDOWS = torch.randint(0, 256, (2, 120), generator=torch.Generator().manual_seed(0))
METHODS = {
    "fp16": Fp16(),
    "kivi": Kivi(residual=32),
    "squat": Squat(rank=3, strength=0.01),
    "innerq": InnerQ(sinks=4, recent=8),
}


@pytest.fixture(scope="module")
def data(study_input):
    return study_input("tiny", WINDOWS)


@pytest.fixture(scope="module")
def found(data):
    return predictions(data.loaded, WINDOWS, METHODS, lambda *_: None)


def stepwise(model, method, tokens: torch.Tensor) -> torch.Tensor:
    """Logits of the second half, which is decoded token by token after the first."""
    with torch.no_grad(), attach(model, method, prefill="compressed", backend="torch") as attached:
        cache = attached.new_cache()
        model(tokens[None, :59], past_key_values=cache, use_cache=True)
        steps = [model(tokens[None, t : t + 1], past_key_values=cache, use_cache=True) for t in range(59, 119)]
    return torch.stack([step.logits[0, -1] for step in steps])


@pytest.mark.parametrize("name", METHODS)
def test_predictions_equal_token_by_token_decoding(data, found, name):
    kl, nll, agreeing, count = 0.0, 0.0, 0, 0
    for tokens in WINDOWS:
        scored = tokens[60:] != data.loaded.tokenizer.unk_token_id
        p = data.loaded.model(tokens[None]).logits[0, 59:-1][scored].double().softmax(-1)
        q = stepwise(data.loaded.model, METHODS[name], tokens)[scored].double().softmax(-1)
        kl += (p * (p / q).log()).sum().item()
        nll -= q[torch.arange(len(q)), tokens[60:][scored]].log().sum().item()
        agreeing += (p.argmax(-1) == q.argmax(-1)).sum().item()
        count += len(q)
    assert count < 120
    one = found[name]
    assert one.kl == pytest.approx(kl / count, rel=1e-3, abs=1e-6)
    assert one.perplexity == pytest.approx(math.exp(nll / count), rel=1e-4)
    assert one.top1 == pytest.approx(agreeing / count)


def test_only_compression_changes_predictions(found):
    assert found["fp16"].kl < 1e-6 and found["fp16"].top1 == 1
    assert all(found[name].kl > 1e-5 for name in ("kivi", "squat", "innerq"))
    assert found["squat"].kl != found["kivi"].kl
    assert found["fp16"].packed_bits == 32  # the model's own numbers
    assert found["kivi"].packed_bits == pytest.approx(2 + 32 / 32)
    assert found["innerq"].packed_bits > 2 + 1 + 16 / 32  # sign bits and a scale per group, and norms

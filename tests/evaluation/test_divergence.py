"""KL divergence against closed forms and a direct float64 computation."""

import math

import pytest
import torch

from kvq_cli.evaluation import divergence as module
from kvq_cli.evaluation.divergence import divergence


def _direct(reference, logits, ids):
    p, q = reference[:-1].double().softmax(-1), logits[:-1].double().softmax(-1)
    picked = torch.arange(len(ids) - 1)
    nll = -q[picked, ids[1:]].log().sum()
    kl = (p * (p / q).log()).sum()
    return nll.item(), -p[picked, ids[1:]].log().sum().item(), kl.item(), (p.argmax(-1) == q.argmax(-1)).sum().item()


@pytest.mark.parametrize("chunk", [1, 100, 1 << 24])
def test_divergence_does_not_depend_on_chunk_size(monkeypatch, chunk):
    monkeypatch.setattr(module, "LOGITS_PER_CHUNK_CPU", chunk)
    torch.manual_seed(0)
    reference, logits, ids = torch.randn(37, 50), torch.randn(37, 50), torch.randint(50, (37,))
    found = divergence(reference, logits, ids)
    assert found.tokens == 36
    expected = pytest.approx(_direct(reference, logits, ids), rel=1e-5)
    assert (found.nll, found.nll_reference, found.kl, found.agreeing) == expected


def test_divergence_of_equal_distributions_is_zero():
    logits = torch.randn(20, 30, dtype=torch.bfloat16)
    found = divergence(logits, logits, torch.randint(30, (20,)))
    assert (found.kl, found.agreeing) == (0.0, 19)
    assert found.nll == found.nll_reference


def test_equal_most_probable_tokens_count_once():
    """16-bit logits have ties: each model's first most probable token counts."""
    reference = torch.tensor([[1.0, 1.0, 0.0], [0.0, 2.0, 2.0], [0.0, 0.0, 0.0]]).half()
    logits = torch.tensor([[1.0, 0.0, 1.0], [2.0, 2.0, 0.0], [0.0, 0.0, 0.0]]).half()
    assert divergence(reference, logits, torch.tensor([0, 0, 0])).agreeing == 1


def test_closed_form_of_two_outcomes():
    reference = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    logits = torch.tensor([[math.log(3.0), 0.0], [0.0, 0.0]])  # q = (3/4, 1/4)
    found = divergence(reference, logits, torch.tensor([0, 1]))
    assert found.kl == pytest.approx(0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(0.5 / 0.25), rel=1e-6)
    assert found.nll == pytest.approx(math.log(4), rel=1e-6)
    assert found.nll_reference == pytest.approx(math.log(2), rel=1e-6)


def test_an_unscored_token_is_no_target(monkeypatch):
    monkeypatch.setattr(module, "LOGITS_PER_CHUNK_CPU", 100)  # two rows at a time, some of which are left out whole
    torch.manual_seed(0)
    reference, logits, ids = torch.randn(37, 50), torch.randn(37, 50), torch.randint(50, (37,))
    ids[10:20], ids[30] = 7, 7
    kept = torch.tensor([t for t in range(36) if ids[t + 1] != 7])
    found = divergence(reference, logits, ids, unscored=7)
    assert found.tokens == len(kept) == 25
    # A last row of which `_direct` reads nothing, and a first token of which it reads nothing.
    rows, targets = torch.cat([kept, kept[:1]]), torch.cat([ids[:1], ids[kept + 1]])
    expected = pytest.approx(_direct(reference[rows], logits[rows], targets), rel=1e-5)
    assert (found.nll, found.nll_reference, found.kl, found.agreeing) == expected

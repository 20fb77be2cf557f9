"""Sampled tokens have the task's distribution, and a stream of their own for each answer."""

from __future__ import annotations

import pytest
import torch

from kvq_cli.evaluation.sampling import Sampling

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"do_sample": False, "temperature": 0.7}, None),
        ({"do_sample": True, "temperature": 0}, None),
        ({"temperature": 0.0}, None),
        ({"temperature": 0.7}, Sampling(0.7)),
        ({"do_sample": True}, Sampling(1.0)),
        ({"do_sample": True, "temperature": None, "top_k": 3, "top_p": 0.9}, Sampling(1.0, 0.9, 3)),
        ({"do_sample": True, "top_k": -1}, Sampling(1.0)),
    ],
)
def test_a_tasks_options_say_whether_and_how_it_samples(options, expected):
    assert Sampling.of(options) == expected


@pytest.mark.parametrize("wrong", [{"temperature": -1}, {"top_p": 0}, {"top_p": 1.5}, {"min_p": 2}])
def test_numbers_that_cannot_be_sampled_with_are_errors(wrong):
    with pytest.raises(ValueError, match="sampling needs a temperature above 0"):
        Sampling.of({"do_sample": True, **wrong})


@pytest.mark.parametrize(
    ("sampling", "kept"), [(Sampling(0.7), 5), (Sampling(1.3, top_k=3), 3), (Sampling(1.0, top_p=0.8), 3)]
)
def test_tokens_are_drawn_with_the_probabilities_of_the_warped_logits(sampling, kept):
    draws = 20_000
    sampler = sampling.sampler([str(number) for number in range(draws)])
    drawn = sampler(torch.zeros(draws, 1, dtype=torch.long), LOGITS.expand(draws, -1)).argmax(-1)
    best = (LOGITS / sampling.temperature).topk(kept)
    expected = torch.zeros(5).scatter(0, best.indices, best.values.softmax(0))
    found = torch.bincount(drawn, minlength=5) / draws
    assert torch.equal(found > 0, expected > 0)
    error = (expected * (1 - expected) / draws).sqrt()
    assert ((found - expected).abs() <= 4 * error).all()


def test_an_answers_noise_does_not_depend_on_its_batch():
    sampling, ids = Sampling(1.0), torch.zeros(1, 1, dtype=torch.long)
    together = sampling.sampler(["a", "b", "c"])
    first = together(ids.expand(3, -1), LOGITS.expand(3, -1))
    together.reorder([2, 0])
    second = together(ids.expand(2, -1), LOGITS.expand(2, -1))
    alone = sampling.sampler(["c"])
    assert torch.equal(alone(ids, LOGITS[None]), first[2:]) and torch.equal(alone(ids, LOGITS[None]), second[:1])
    assert len({row.argmax().item() for row in torch.cat([first, second])}) > 1

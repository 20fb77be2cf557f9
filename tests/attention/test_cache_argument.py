"""Caches are found under both names that versions of transformers give them, and passed under the installed one's."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from counted_graphs import counted_graphs
from transformers.utils import logging

from kvq_cli import cache_argument as names
from kvq_cli.attention.attach import attach
from kvq_cli.attention.graphs import captured_steps
from kvq_cli.attention.shared_prompts import SharedPrompts
from kvq_cli.data.texts import continued
from kvq_cli.errors import UsageError
from kvq_cli.evaluation.generation import continue_ids
from kvq_cli.evaluation.scoring import continuation_logits
from kvq_cli.methods.registry import build

IDS = torch.arange(3, 43).view(1, 40) % 97
KIVI = {"group": 8, "residual": 8}
OPTIONS = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}
#: The names that the installed transformers accepts.
ACCEPTED = ("cache", "past_key_values") if names.cache_name() == "cache" else ("past_key_values",)


@pytest.mark.parametrize("own, other", [("past_key_values", "cache"), ("cache", "past_key_values")])
def test_the_installed_name_goes_first(monkeypatch, own, other):
    monkeypatch.setattr(names, "cache_name", lambda: own)
    assert names.cache_argument(1) == {own: 1}
    assert names.passed_cache({other: 2, own: 1}) == 1
    assert names.passed_cache({other: 2, own: None}) == 2
    assert names.passed_cache({own: None, "use_cache": True}) is None
    assert names.without_cache({other: 2, "use_cache": True, own: 1}) == {"use_cache": True}


def test_models_take_the_cache_by_the_name_of_their_outputs(tiny):
    model = tiny("llama")
    assert names.cache_name() in inspect.signature(model.forward).parameters
    assert names.cache_name() in model(IDS, use_cache=True)


@pytest.mark.parametrize("name", ["past_key_values", "cache"])
def test_a_cache_is_compressed_by_any_accepted_name_and_refused_by_others(tiny, name):
    model = tiny("llama")
    with attach(model, build("kivi", **KIVI)) as kv, torch.no_grad():
        expected, cache = kv.generate(IDS, **OPTIONS), kv.new_cache()
        if name not in ACCEPTED:
            with pytest.raises(ValueError, match=name):
                model.generate(IDS, **{name: cache}, **OPTIONS)
            with pytest.raises(UsageError, match=f"passes {name} to its attention"):
                model(IDS, **{name: cache})
            return
        assert torch.equal(model.generate(IDS, **{name: cache}, **OPTIONS), expected)
        held = cache.get_seq_length()
        assert held == expected.shape[1] - 1 and cache.report().compressed
        assert getattr(model(IDS[:, :1], **{name: cache}), name) is cache
        assert cache.get_seq_length() == held + 1


@pytest.fixture
def no_old_names(monkeypatch):
    """transformers warns of an old name of an argument, and once in a process logs that of an output."""

    def refuse(_logger, message: str, *_: object) -> None:
        raise FutureWarning(message)

    monkeypatch.setattr(type(logging.get_logger("transformers.utils.generic")), "warning_once", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        yield


@pytest.mark.usefixtures("no_old_names")
def test_kvq_uses_the_installed_name(tiny):
    """Wherever it passes a cache or reads one from an output."""
    model, mask, options = tiny("llama", num_hidden_layers=1), torch.ones_like(IDS), {**OPTIONS, "max_new_tokens": 4}
    assert continued(model, IDS, 44, lambda logits: logits.argmax(-1, keepdim=True)).shape == (1, 44)
    with attach(model, build("fp16")) as first, attach(model, build("kivi", **KIVI), backend="triton") as kv:
        kv.generate(IDS, **names.cache_argument(None), **options)
        kv.generate(IDS, **options, prompt_lookup_num_tokens=3)
        prompts = SharedPrompts([first, kv])
        for each in (first, kv):
            with prompts.used_by(each):
                continue_ids(model, IDS, mask, each.new_cache(), options)
        with captured_steps(model, kv.hooks, kv.backend, counted_graphs):
            continue_ids(model, IDS, mask, kv.new_cache(), options)
        [scores] = continuation_logits(kv, [IDS[0].tolist()], [[5, 6]])[0]
        assert scores.shape == (2, 97)

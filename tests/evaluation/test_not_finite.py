"""NaN behind the last layer's keys: generation, scores and tasks fail, and nothing is stored."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from kvq_cli.attention.attach import attach
from kvq_cli.errors import NotFiniteError
from kvq_cli.evaluation.compared_methods import compared_methods
from kvq_cli.evaluation.generation import generate_answers
from kvq_cli.evaluation.runner import evaluate
from kvq_cli.evaluation.scoring import continuation_logits
from kvq_cli.evaluation.settings import EvaluationSettings
from kvq_cli.methods.registry import build


@pytest.fixture(params=["final norm", "last MLP"])
def broken(loaded, request):
    """A model whose cached keys and values are all finite, and whose logits are NaN."""
    model = copy.deepcopy(loaded.model)
    last = model.model.norm if request.param == "final norm" else model.model.layers[-1].mlp.down_proj
    last.weight.data.fill_(torch.nan)
    return replace(loaded, model=model)


@pytest.mark.parametrize("name", ["fp16", "kivi"])
def test_answers_and_scores_are_refused(broken, name):
    prompt = list(range(5, 45))
    with attach(broken.model, build(name)) as kv:
        with pytest.raises(NotFiniteError, match="logits contain NaN or infinity"):
            generate_answers(broken, kv, [prompt], 4)
        with pytest.raises(NotFiniteError, match="logits contain NaN or infinity"):
            continuation_logits(kv, [prompt], [prompt[:4]])


@pytest.mark.parametrize("task", ["perplexity", "niah_single_1"])
def test_an_evaluation_stores_nothing(broken, tmp_path, task):
    settings = EvaluationSettings(tasks=[task], seqlens=[320], samples=1, prompt_tokens=16)
    with pytest.raises(NotFiniteError, match="logits contain NaN or infinity"):
        evaluate(broken, compared_methods([build("fp16"), build("kivi")]), settings, tmp_path / "out")
    stored = [path for path in tmp_path.rglob("*") if path.is_file() and "samples" in path.parts]
    assert not any(path.read_text().count("\n") > 1 for path in stored)
    assert not list(tmp_path.rglob("results.json"))


def test_a_token_that_is_barred_is_no_error(loaded):
    """Logits of -inf bar a token."""
    model = copy.deepcopy(loaded.model)

    def bar(_module, _args, output) -> None:
        output.logits[..., :3] = -torch.inf

    model.register_forward_hook(bar)
    with attach(model, build("kivi")) as kv:
        answers, _ = generate_answers(replace(loaded, model=model), kv, [list(range(5, 45))], 4)
    assert answers[0].tokens


def test_steps_that_nobody_waited_for_are_checked_at_the_end(loaded, monkeypatch):
    """As on a GPU, where decode steps do not wait for the device."""
    model = copy.deepcopy(loaded.model)
    monkeypatch.setattr("kvq_cli.attention.attention_hooks.would_sync", lambda device, columns: columns == 1)
    with attach(model, build("kivi")) as kv, torch.no_grad():
        cache, ids = kv.new_cache(), torch.arange(5, 45)[None]
        model(ids, past_key_values=cache)
        model.model.norm.weight.data.fill_(torch.nan)
        model(ids[:, :1], past_key_values=cache)
        with pytest.raises(NotFiniteError):
            kv.check_steps()
        kv.check_steps()  # said once


def test_steps_of_an_answer_that_was_given_up_do_not_count(loaded, monkeypatch):
    """Neither of one thread after another, whose ids may be the same, nor before the next prompt."""
    model, weight = copy.deepcopy(loaded.model), loaded.model.model.norm.weight
    monkeypatch.setattr("kvq_cli.attention.attention_hooks.would_sync", lambda device, columns: columns == 1)
    ids = torch.arange(5, 45)[None]
    with attach(model, build("kivi")) as kv, torch.no_grad():

        def step(scale: float) -> None:
            model.model.norm.weight.data.copy_(weight)
            cache = kv.new_cache()
            model(ids, past_key_values=cache)
            model.model.norm.weight.data.mul_(scale)
            model(ids[:, :1], past_key_values=cache)

        step(torch.nan)
        step(1.0)
        kv.check_steps()
        for scale in (torch.nan, 1.0, torch.nan, 1.0):
            with ThreadPoolExecutor(1) as thread:
                thread.submit(step, scale).result()
                if scale == 1.0:
                    thread.submit(kv.check_steps).result()

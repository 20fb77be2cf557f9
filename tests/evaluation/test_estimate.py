"""The estimate of an evaluation's time: from trials, before the first sample, of unfinished samples alone."""

from types import SimpleNamespace

import pytest
import torch

from kvq_cli.attention.attach import attach
from kvq_cli.distributed import Workers
from kvq_cli.evaluation import estimate as module
from kvq_cli.evaluation.compared_methods import compared_methods
from kvq_cli.evaluation.estimate import Speed
from kvq_cli.evaluation.runner import evaluate
from kvq_cli.evaluation.settings import EvaluationSettings, build_evaluations
from kvq_cli.methods.registry import build

COMPARED = (build("kivi", bits=2, residual=32), build("kivi", bits=4, residual=32), build("innerq", recent=32))


def _evaluate(loaded, out, **settings):
    said: list[str] = []
    settings = {"tasks": ["perplexity"], "seqlens": [96], "prompt_tokens": 32, "samples": 3, **settings}

    def track(description, total, done):
        said.append(f"{description}: {done} of {total}")
        return lambda count: None

    evaluate(loaded, compared_methods(COMPARED), EvaluationSettings(**settings), out, track=track, note=said.append)
    return said


@pytest.fixture
def speeds(monkeypatch):
    """Known speeds in place of measured ones; yields the methods that were timed, with their numbers of tokens."""
    timed = []

    def measure(attached, tokens, scores, decodes):
        timed.append((attached.method.name, tokens, scores, decodes))
        return Speed(1.0, 2.0, 10.0) if attached.method.name == "kivi" else Speed(3.0, 4.0, 50.0)

    monkeypatch.setattr(module, "measure_speed", measure)
    monkeypatch.setattr(module, "_measure_plain", lambda loaded, tokens: 0.5)
    return timed


def test_the_time_of_each_method_counts_its_own_tokens(loaded, tmp_path, speeds):
    # kivi: 2 configurations x 3 windows of 32 + 2 x 64 s; innerq: 3 windows of 3 x 32 + 4 x 64 s; plain: 3 x 96 / 2 s
    said = _evaluate(loaded, tmp_path)
    assert said[0] == "about 0:36:00 for 9 samples (2 methods timed on 16 tokens)"
    assert 2 * 3 * 160 + 3 * 352 + 144 == 36 * 60
    assert speeds == [("kivi", 16, True, False), ("innerq", 16, True, False)]


def test_finished_samples_take_no_time(loaded, tmp_path, speeds):
    _evaluate(loaded, tmp_path, samples=1)
    assert _evaluate(loaded, tmp_path)[0].startswith("about 0:24:00 for 6 samples")
    assert _evaluate(loaded, tmp_path)[0].startswith("perplexity-96: 9 of 9")
    assert len(speeds) == 4


def test_answers_are_taken_to_be_as_long_as_they_may_be(loaded, tmp_path, speeds):
    said = _evaluate(loaded, tmp_path, tasks=["vt"], seqlens=[512], templates="reference", samples=2, batch_size=2)
    note = next(line for line in said if line.startswith("about"))
    assert "for 6 samples, if answers are as long as they may be (" in note
    assert said.index(note) < said.index("vt-512: 0 of 6")
    assert {(scores, decodes) for _, _, scores, decodes in speeds} == {(False, True)}


@pytest.mark.parametrize(("scores", "decodes"), [(True, False), (False, True)])
def test_speeds_are_measured(loaded, scores, decodes):
    with attach(loaded.model, COMPARED[0]) as attached:
        speed = module.measure_speed(attached, 64, scores, decodes)
    assert 0 < speed.token <= speed.scored and (speed.step > 0) == decodes


def test_trials_use_the_threads_of_a_worker(loaded, speeds, monkeypatch):
    """On more, they would compete with busy workers, and be several times slower than a worker is."""
    seen = []
    for name, result in (("measure_speed", Speed(1.0, 2.0, 10.0)), ("_measure_plain", 0.5)):
        monkeypatch.setattr(module, name, lambda *_, result=result: seen.append(torch.get_num_threads()) or result)
    monkeypatch.setattr(module, "threads_per_task", lambda: 2)
    settings = EvaluationSettings(tasks=["perplexity"], seqlens=[96], prompt_tokens=32, samples=3)
    evaluations = build_evaluations(settings, loaded, lambda *_: lambda _: None)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with attach(loaded.model, COMPARED[0]) as attached:
            logs = {("kivi", evaluations[0].name): SimpleNamespace(records={})}
            text = module.estimate(loaded, evaluations, {"kivi": attached}, logs, Workers(4, 0))
        assert torch.get_num_threads() == 3 and seen == [2, 2] and text.endswith("16 tokens, 4 workers)")
    finally:
        torch.set_num_threads(before)

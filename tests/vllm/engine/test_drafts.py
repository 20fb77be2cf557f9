"""Speculative decoding gives the tokens of decoding one at a time, however many drafted tokens are right."""

import itertools

import pytest
from scripted_drafts import CONFIG, ScriptedDrafts
from vllm_engines import NEW, V2

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def token_ids(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def accepted(monkeypatch) -> set[tuple[int, int]]:
    """(drafted tokens, accepted ones) of requests in steps of engines."""
    from vllm.v1.core.sched.scheduler import Scheduler

    counts, count = set(), Scheduler.make_spec_decoding_stats

    def counted(self, stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs):
        counts.add((num_draft_tokens, num_accepted_tokens))
        return count(self, stats, num_draft_tokens, num_accepted_tokens, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "make_spec_decoding_stats", counted)
    return counts


@pytest.fixture
def scripted(case, prompts, monkeypatch):
    """Let the proposer of `CONFIG` know a method's answers."""

    def script(method: str) -> list[list[int]]:
        expected = case(method).expected
        answers = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}
        monkeypatch.setattr(ScriptedDrafts, "answers", answers)
        return expected

    return script


@pytest.mark.parametrize("method", ["kivi:sinks=32:recent=96", "innerq:norm=off", "turboquant", "kvquant", "klt"])
def test_requests_with_different_drafts_and_prefix_hits_equal_generate(
    method, case, scripted, start, prompts, accepted
):
    expected = scripted(method)
    with start(method, speculative_config=CONFIG) as engine:
        assert token_ids(engine.tokens(prompts)) == expected
        assert {(4, right) for right in range(5)} <= accepted
        some = slice(1, 5)
        again, size = engine.tokens(prompts[some], NEW[some]), case(method).layout.block_size
        assert [output.num_cached_tokens for output in again] == [(len(p) - 1) // size * size for p in prompts[some]]
        assert token_ids(again) == expected[some]
        assert engine.free_blocks == engine.all_blocks


@pytest.mark.parametrize("method", ["kivi", "temporalkv"])
def test_chunked_prefill_and_preemption_equal_generate(method, case, scripted, start, prompts, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    steps, preempted, schedule, preempt = itertools.count(1), [], Scheduler.schedule, Scheduler._preempt_request

    def resetting(self, *args, **kwargs):
        if next(steps) in (20, 35):
            self.reset_prefix_cache(reset_running_requests=True)
        return schedule(self, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "schedule", resetting)
    monkeypatch.setattr(Scheduler, "_preempt_request", lambda *args, **kw: preempted.append(1) or preempt(*args, **kw))
    expected, layout = scripted(method), case(method).smallest
    with start(method, layout.block_size, speculative_config=CONFIG, max_num_batched_tokens=48) as engine:
        assert token_ids(engine.tokens(prompts)) == expected
        assert engine.free_blocks == engine.all_blocks
    assert len(preempted) > 2


@pytest.mark.parametrize("method", ["kivi:sinks=32:recent=96", "klt"])
def test_ngram_drafts_equal_generate(method, case, start, prompts, accepted, monkeypatch):
    """Also with vLLM's V2 runner, which schedules a step before it knows what the last one rejected."""
    monkeypatch.setenv("KVQ_VLLM_ASYNC", "1")  # V1 turns it off for these drafts
    with start(method, speculative_config=NGRAM) as engine:
        assert engine.scheduler.scheduler_config.async_scheduling == V2
        assert token_ids(engine.tokens(prompts)) == case(method).expected
        assert engine.free_blocks == engine.all_blocks
    assert any(right < drafted for drafted, right in accepted)

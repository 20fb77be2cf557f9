"""Batches that rows leave when their answers have ended."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from kvq_cli.attention.attach import attach
from kvq_cli.errors import KvqError
from kvq_cli.evaluation import generation
from kvq_cli.evaluation.generation import generate_answers
from kvq_cli.methods.registry import build_parsed

LENGTHS = (90, 60, 75, 84, 66)
METHODS = ("fp16", "kivi:residual=32", "innerq", "zipcache")


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(5, 1000, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.fixture
def rows(loaded):
    """The rows of each forward pass of the model."""
    seen = []
    undo = loaded.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(args[0] if args else kwargs["input_ids"])), with_kwargs=True
    )
    yield seen
    undo.remove()


def _stop_at_first(loaded, monkeypatch, method, prompts):
    """End all answers but the first early: at their third to sixth tokens."""
    with attach(loaded.model, method, prefill="compressed") as attached:
        free = [_ids(loaded, attached, prompt) for prompt in prompts]
    stops = {ids[2 + row] for row, ids in enumerate(free[1:])} - set(free[0])
    monkeypatch.setattr(generation, "stop_tokens", lambda *_: sorted(stops))


def _ids(loaded, attached, prompt):
    cache = attached.new_cache(len(prompt) + 24)
    out = loaded.model.generate(
        torch.tensor([prompt]), past_key_values=cache, max_new_tokens=24, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", METHODS)
def test_ended_answers_leave_the_batch(loaded, prompts, rows, monkeypatch, name):
    """Codes of a prompt's batch and of the prompt alone are the same: so are the answers and what their rows hold."""
    method = build_parsed(name)
    _stop_at_first(loaded, monkeypatch, method, prompts)
    rows.clear()
    with attach(loaded.model, method, prefill="compressed") as attached:
        together, report = generate_answers(loaded, attached, prompts, 24)
        steps = list(rows)
        alone, reports = zip(*(generate_answers(loaded, attached, [prompt], 24) for prompt in prompts), strict=True)
    assert together == [one for [one] in alone]
    assert together[0].tokens == 24 and all(one.tokens < 12 for one in together[1:])
    assert steps[0] == 5 and steps[-1] == 1 and steps == sorted(steps, reverse=True) and len(steps) == 24
    first = max(one.tokens for one in together[1:])
    assert steps[first + 1 :] == [1] * (24 - first - 1)
    assert report.constants == reports[0].constants
    # A row is counted as it was when it left.
    held = sum(one.tokens for one in reports)
    assert report.tokens == held


def test_reports_count_rows_as_they_leave(loaded, prompts, monkeypatch):
    """Two answers that end at once, and two that go on: no token is counted that a row alone would not have."""
    same = [prompts[1], prompts[1], prompts[4][:60], prompts[4][:60]]
    method = build_parsed("kivi:residual=32")
    with attach(loaded.model, method, prefill="compressed") as attached:
        stop, other = (_ids(loaded, attached, prompt) for prompt in (same[0], same[2]))
        last = next(token for place, token in enumerate(stop) if 2 < place < 12 and token not in other + stop[:place])
        monkeypatch.setattr(generation, "stop_tokens", lambda *_: [last])
        _, report = generate_answers(loaded, attached, same, 24)
        alone = [generate_answers(loaded, attached, [prompt], 24)[1] for prompt in same]
    for field in dataclasses.fields(report):
        values = [getattr(one, field.name) for one in alone]
        if field.name in ("numbers", "packed_numbers", "tokens", "compressed", "reserved"):
            assert getattr(report, field.name) == sum(values)
        elif field.name == "parts":
            assert report.parts == {name: sum(one.parts[name] for one in alone) for name in report.parts}
        else:
            assert getattr(report, field.name) == values[0]


def test_reports_do_not_charge_rows_that_left_for_longer_ones(loaded, monkeypatch):
    """The long answer ends at once: the short one's room up to the long one's length is none of its own."""
    long, short = list(range(20, 340)), list(range(50, 170))
    with attach(loaded.model, build_parsed("kivi:residual=32"), prefill="compressed") as attached:
        stop, other = (_ids(loaded, attached, prompt) for prompt in (long, short))
        last = next(token for place, token in enumerate(stop) if place < 12 and token not in other + stop[:place])
        monkeypatch.setattr(generation, "stop_tokens", lambda *_: [last])
        _, report = generate_answers(loaded, attached, [long, short], 24)
        alone = [generate_answers(loaded, attached, [prompt], 24)[1] for prompt in (long, short)]
    assert 0 <= report.reserved <= report.parts["unused"]
    assert report.bytes - report.reserved == sum(one.bytes - one.reserved for one in alone)
    assert (report.tokens, report.numbers) == (sum(one.tokens for one in alone), sum(one.numbers for one in alone))


def test_token_without_embedding_is_an_error(loaded, prompts):
    size = loaded.model.config.vocab_size
    says = f"gave token id {size:,}, the model has {size:,} embeddings"
    with attach(loaded.model, build_parsed("fp16")) as attached, pytest.raises(KvqError, match=says):
        generate_answers(loaded, attached, [prompts[0], [5, size]], 4)


def test_pad_token_that_was_added_to_the_tokenizer_alone(loaded, prompts):
    """Shorter rows of a batch are filled up with a token that the model has."""
    tokenizer = copy.copy(loaded.tokenizer)
    tokenizer.pad_token_id = loaded.model.config.vocab_size + 3
    other = dataclasses.replace(loaded, tokenizer=tokenizer)
    with attach(loaded.model, build_parsed("kivi:residual=32"), prefill="compressed") as attached:
        expected, _ = generate_answers(loaded, attached, prompts, 8)
        assert generate_answers(other, attached, prompts, 8)[0] == expected


def test_stop_strings_that_are_special_tokens_end_answers(loaded, prompts):
    """Answers are decoded without special tokens, where such a string would not be found."""
    with attach(loaded.model, build_parsed("fp16")) as attached:
        ids = _ids(loaded, attached, prompts[0])
        place, token = next((place, one) for place, one in enumerate(ids) if place > 3 and one not in ids[:place])
        special = dataclasses.replace(loaded, tokenizer=copy.deepcopy(loaded.tokenizer))
        stop = special.tokenizer.convert_ids_to_tokens(token)
        special.tokenizer.add_special_tokens({"additional_special_tokens": [stop]})
        assert special.tokenizer.convert_tokens_to_ids(stop) == token
        [free], [answer] = (generate_answers(special, attached, prompts[:1], 24, [*stops])[0] for stops in ("", [stop]))
    assert free.tokens == 24 and answer.tokens == place + 1
    assert answer.text == special.tokenizer.decode(ids[:place])


def test_stop_strings_end_rows_too(loaded, prompts, rows):
    with attach(loaded.model, build_parsed("fp16")) as attached:
        [free] = generate_answers(loaded, attached, prompts[:1], 24)[0]
        stop = free.text[len(free.text) // 4 :][:4]
        rows.clear()
        answers, _ = generate_answers(loaded, attached, prompts[:2], 24, [stop])
        alone = [generate_answers(loaded, attached, [prompt], 24, [stop])[0][0] for prompt in prompts[:2]]
    assert answers == alone and stop not in answers[0].text and answers[0].tokens < 24
    assert 1 in rows and rows[0] == 2

"""Long passes over codes of all layers together are computed in parts, to the logits of one-by-one decoding."""

from __future__ import annotations

import pytest
import torch
from method_cases import ready
from random_artifacts import tiny_model

from kvq_cli import attach
from kvq_cli.errors import KvqError, UsageError

OPTIONS = {"bits": 4, "sinks": 3, "recent": 8, "buffer": 2}
TOKENS = 50


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 40, (2, TOKENS), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_a_long_pass_gives_what_decoding_gives(model, ids):
    mask = torch.ones_like(ids)
    mask[0, :11] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with attach(model, ready("kvtc", OPTIONS, model), prefill="compressed") as kv:
        cache, steps = kv.new_cache(), kv.new_cache()
        whole = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache).logits
        one_by_one = [
            model(
                ids[:, i : i + 1],
                attention_mask=mask[:, : i + 1],
                position_ids=positions[:, i : i + 1],
                past_key_values=steps,
            ).logits
            for i in range(TOKENS)
        ]
        assert cache.get_seq_length() == TOKENS and kv.report(cache).packed_numbers > 0
        assert kv.report(cache).parts | {"unused": 0} == kv.report(steps).parts | {"unused": 0}
    real = mask.bool()
    torch.testing.assert_close(whole[real], torch.cat(one_by_one, dim=1)[real], rtol=1e-3, atol=1e-3)
    assert (whole - model(ids, attention_mask=mask, position_ids=positions).logits)[real].abs().max() > 0.01


@torch.no_grad()
@pytest.mark.parametrize("keep", [0, 1, 13])
def test_logits_to_keep_count_from_the_end(model, ids, keep):
    with attach(model, ready("kvtc", OPTIONS, model), prefill="compressed") as kv:
        every = model(ids, past_key_values=kv.new_cache()).logits
        kept = model(ids, past_key_values=kv.new_cache(), logits_to_keep=keep).logits
    torch.testing.assert_close(kept, every[:, -keep:])


@torch.no_grad()
def test_exact_prompts_are_one_pass(model, ids):
    """Their logits are those of the model without compression; the tokens that follow see codes."""
    own = model(ids).logits
    with attach(model, ready("kvtc", OPTIONS, model)) as kv:
        cache = kv.new_cache()
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, own)
        assert kv.report(cache).working["components"] > 0
        out = model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)
        assert out.shape == (2, TOKENS + 12)
    assert "forward" not in vars(model)


@torch.no_grad()
def test_what_cannot_be_cut_is_refused(model, ids):
    with attach(model, ready("kvtc", OPTIONS, model), prefill="compressed") as kv:
        with pytest.raises(UsageError, match="computed 8 at a time .* do not pass labels"):
            model(ids, labels=ids, past_key_values=kv.new_cache())
        with pytest.raises(UsageError, match="do not pass return_dict=False"):
            model(ids, return_dict=False, past_key_values=kv.new_cache())
        with pytest.raises(UsageError, match="give logits_to_keep as a number"):
            model(ids, logits_to_keep=torch.tensor([1, 3]), past_key_values=kv.new_cache())
        with pytest.raises(UsageError, match="give at most 8 tokens at once"):
            model.model(ids, past_key_values=kv.new_cache())
        assert model(ids[:, :8], past_key_values=kv.new_cache(), output_hidden_states=True).hidden_states


@torch.no_grad()
def test_a_pass_that_ends_in_a_later_part_leaves_a_cache_that_is_refused(model, ids):
    with attach(model, ready("kvtc", OPTIONS, model), prefill="compressed") as kv:
        cache = kv.new_cache()
        wrong = torch.arange(TOKENS).repeat(2, 1)
        wrong[:, 20:] += 5  # a gap, which the third part has
        with pytest.raises(UsageError):
            model(ids, position_ids=wrong, past_key_values=cache)
        with pytest.raises(KvqError, match="half updated"):
            model(ids[:, :4], past_key_values=cache)


@torch.no_grad()
def test_a_mask_of_other_columns_is_refused_as_in_one_pass(model, ids):
    mask = torch.ones(2, TOKENS + 10, dtype=torch.long)
    kv = attach(model, ready("kvtc", OPTIONS, model), prefill="compressed")
    with kv, pytest.raises(UsageError, match="attention_mask"):
        model(ids, attention_mask=mask, past_key_values=kv.new_cache())


def test_more_than_logits_by_the_models_config_is_refused(model, ids, monkeypatch):
    with attach(model, ready("kvtc", OPTIONS, model), prefill="compressed") as kv:
        monkeypatch.setattr(model.config, "output_hidden_states", True)
        with pytest.raises(UsageError, match="do not pass output_hidden_states"), torch.no_grad():
            model(ids, past_key_values=kv.new_cache())

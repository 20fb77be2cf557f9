"""Models with layers of other kinds: attention is compressed, other layers keep transformers' own states."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from model_matrix import FAMILIES, tiny_model
from tiers import slow
from transformers import DynamicCache

from kvq_cli.attention.attach import attach
from kvq_cli.benchmarking.accounting import account
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.layer_kinds import attention_layers
from kvq_cli.methods.registry import build
from kvq_cli.models import model_shape

#: Linear attention, convolutions, chunked attention, Mamba beside attention.
FAST = ("qwen3_next", "lfm2", "llama4_text", "falcon_h1")
OTHERS = ("bamba", "granitemoehybrid", "jamba", "nemotron_h", "olmo_hybrid", "qwen3_5_text")
#: Logits that are computed in the same way, but for the attention of kvq's own functions.
CLOSE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def model():
    """`model("lfm2")`: the family's tiny model, made once."""
    made = {}

    def get(family):
        if family not in made:
            made[family] = tiny_model(family, **FAMILIES[family])
        return made[family]

    return get


def logits(model, ids, cache, starts, mask=None):
    parts = []
    for first, last in pairwise(starts):
        seen = None if mask is None else mask[:, :last]
        parts.append(model(ids[:, first:last], past_key_values=cache, attention_mask=seen).logits)
    return torch.cat(parts, dim=1)


def both(model, kv, ids, starts, mask=None):
    """Logits with transformers' cache and with kvq's, of tokens only."""
    own = logits(model, ids, DynamicCache(config=model.config), starts, mask)
    cache = kv.new_cache()
    actual = logits(model, ids, cache, starts, mask)
    if mask is not None:
        own, actual = own[mask.bool()], actual[mask.bool()]
    return own, actual, cache


@pytest.mark.parametrize("family", [*FAST, *slow(*OTHERS)])
def test_16_bits_give_the_models_own_logits(model, prompt, family):
    """Token by token, in chunks, and left-padded; with the rows that beams have; again after reset."""
    model, (ids, mask) = model(family), prompt(30, pads=(5, 0))
    chunks, single = [0, 13, 21, 22, 23, 29, 30], list(range(13))
    with attach(model, build("fp16")) as kv, torch.no_grad():
        torch.testing.assert_close(*both(model, kv, ids[1:], single)[:2], **CLOSE)
        own, actual, cache = both(model, kv, ids, chunks, mask)
        torch.testing.assert_close(actual, own, **CLOSE)
        assert cache.layers[1] in cache.compressed
        # Row 0 of a reset cache, which held two rows.
        cache.reset()
        assert cache.get_seq_length() == 0 and cache.report().states == 0
        own = logits(model, ids[1:], DynamicCache(config=model.config), chunks)
        torch.testing.assert_close(logits(model, ids[1:], cache, chunks), own, **CLOSE)


@pytest.mark.parametrize("family", [*FAST, *slow(*OTHERS)])
def test_rows_are_repeated_reordered_and_copied_with_their_states(model, prompt, family):
    model, (ids, _) = model(family), prompt(24, pads=(0, 0))
    with attach(model, build("fp16")) as kv, torch.no_grad():
        cache = kv.new_cache()
        logits(model, ids, cache, [0, 19, 20])
        copied = cache.clone()
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 1, 0]))
        own = DynamicCache(config=model.config)
        logits(model, ids, own, [0, 19, 20])
        own.reorder_cache(torch.tensor([1, 0, 0]))
        expected = model(ids[[1, 0, 0], 20:], past_key_values=own).logits
        torch.testing.assert_close(model(ids[[1, 0, 0], 20:], past_key_values=cache).logits, expected, **CLOSE)
        copied.batch_select_indices(torch.tensor([False, True]))  # unchanged by what was added to the original
        own = DynamicCache(config=model.config)
        logits(model, ids, own, [0, 19, 20])
        own.reorder_cache(torch.tensor([1]))
        expected = model(ids[1:, 20:], past_key_values=own).logits
        torch.testing.assert_close(model(ids[1:, 20:], past_key_values=copied).logits, expected, **CLOSE)


@pytest.mark.parametrize("family", ["qwen3_next", *slow("falcon_h1", "lfm2", "llama4_text")])
def test_beam_search_gives_the_models_own_answer(model, prompt, family):
    model, (ids, mask) = model(family), prompt(12, pads=(4, 0))
    settings = {"num_beams": 3, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    own = model.generate(ids, attention_mask=mask, **settings)
    with attach(model, build("fp16")) as kv:
        actual = model.generate(ids, attention_mask=mask, past_key_values=kv.new_cache(), **settings)
    assert torch.equal(actual, own)


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_tokens_behind_a_recurrent_state_are_not_taken_back(model, prompt, family):
    model, (ids, _) = model(family), prompt(20)
    with attach(model, build("fp16")) as kv, torch.no_grad():
        cache = kv.new_cache()
        model(ids, past_key_values=cache)
        with pytest.raises(UsageError, match=r"crop\(-3\): layer 0 holds a state .*: read the text anew"):
            cache.crop(-3)
        assert cache.get_seq_length() == 20
        cache.crop(-20)  # as a reset
        own = model(ids, past_key_values=DynamicCache(config=model.config)).logits
        torch.testing.assert_close(model(ids, past_key_values=cache).logits, own, **CLOSE)


@pytest.mark.parametrize("family", ["lfm2", "llama4_text"])
def test_convolutions_and_chunks_give_recorded_tokens_back(model, prompt, family):
    model, (ids, _) = model(family), prompt(20)
    with attach(model, build("fp16")) as kv, torch.no_grad():
        cache = kv.new_cache()
        model(ids[:, :10], past_key_values=cache)
        with pytest.raises(UsageError, match=r"crop\(-3\): layer 0 holds a state"):
            cache.crop(-3)  # nothing was recorded
        cache.activate_past_recording()
        model(ids[:, 10:16], past_key_values=cache)
        cache.crop(-4)
        own = both(model, kv, ids, [0, 10, 12, 20])[0][:, 12:]
        torch.testing.assert_close(model(ids[:, 12:], past_key_values=cache).logits, own, **CLOSE)


@pytest.mark.parametrize("family", ["lfm2", "llama4_text"])
def test_tokens_beyond_the_record_are_not_taken_back(model, prompt, family):
    """Assisted generation drops the record after each pass, and the last: later passes keep what the model sees."""
    model, (ids, _) = model(family), prompt(40)
    with attach(model, build("fp16")) as kv, torch.no_grad():
        cache = kv.new_cache()
        settings = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = model.generate(ids, past_key_values=kv.new_cache(), **settings)
        assert torch.equal(model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=4, **settings), expected)
        tokens = cache.get_seq_length()
        with pytest.raises(UsageError, match="holds a state that cannot give tokens back"):
            cache.crop(-25)
        assert cache.get_seq_length() == tokens
        held = cache.report().states
        logits(model, ids, cache, [0, 1, 2, 3, 4, 5])
        assert cache.report().states == held


def test_drafts_over_a_recurrent_state_are_refused_before_the_first_token(model, prompt):
    """`generate` refuses them by itself for most models with such states."""
    model, (ids, _) = model("qwen3_next"), prompt(20)
    with attach(model, build("fp16")) as kv, torch.no_grad():
        cache = kv.new_cache()
        cache.activate_past_recording()
        with pytest.raises(
            UsageError, match="layer 0 of .* has a recurrent state, .*: generate without assistant_model"
        ):
            model(ids, past_key_values=cache, logits_to_keep=4)
        assert cache.get_seq_length() == 0


def test_a_pass_that_ends_behind_the_last_attention_is_refused(model, prompt, monkeypatch):
    model, (ids, _) = model("qwen3_next"), prompt(20)
    with attach(model, build("fp16")) as kv, torch.no_grad():
        cache = kv.new_cache()
        model(ids, past_key_values=cache)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(model.model.layers[2].mlp, "forward", interrupt)
            model(ids[:, :1], past_key_values=cache)
        with pytest.raises(KvqError, match="half updated"):
            model(ids[:, :1], past_key_values=cache)


def interrupt(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("family", ["falcon_h1", "qwen3_next", *slow("lfm2", "llama4_text")])
def test_reports_and_plans_count_attention_and_name_other_states(model, prompt, family, tmp_path):
    model, (ids, _) = model(family), prompt(40)
    shape, method = model_shape(model), build("kivi", bits=2, group=16, residual=16)
    count = len(shape.cached_layers)
    assert count == (3 if family == "falcon_h1" else 1) and shape.layers == 3
    own = DynamicCache(config=model.config)
    with attach(model, method) as kv, torch.no_grad():
        cache = kv.new_cache()
        model(ids, past_key_values=cache)
        model(ids, past_key_values=own)
        report, planned = cache.report(), account(method, shape, 40)
        assert report.fp16_bytes == 40 * count * 2 * shape.kv_heads * shape.head_dim * 2 == planned.fp16_bytes
        assert sizes(report) == sizes(planned) and report.tokens == planned.tokens == 40
        assert report.compressed == planned.compressed
        held = [layer for index, layer in enumerate(own.layers) if family == "falcon_h1" or index != 1]
        expected = [x for layer in held for name in ("conv_states", "recurrent_states") for x in states(layer, name)]
        if family == "llama4_text":
            expected = [x for layer in held for x in (layer.keys, layer.values)]
        assert report.states == sum(x.nbytes for x in expected) > 0
        assert f"other states {report.states:,} bytes" in str(report) and report.to_dict()["states"] == report.states
        assert (report + report).states == 2 * report.states
        with pytest.raises(UsageError, match="as layer 0 has, cannot be saved: keep it in memory"):
            cache.save(tmp_path / "cache", ids)


def sizes(report):
    return {name: size for name, size in report.parts.items() if size}


def states(layer, name):
    return [x for x in getattr(layer, name, {}).values() if x is not None]


def test_chunked_attention_alone_is_refused(prompt):
    model = tiny_model("llama4_text", attention_chunk_size=7, no_rope_layers=[1, 1, 1])
    says = "llama4_text: all layers are of kind chunked_attention: none to compress"
    with pytest.raises(UsageError, match=says), attach(model, build("fp16")):
        pass


def test_layers_of_unknown_kinds_are_named():
    config = SimpleNamespace(model_type="new", layer_types=["linear_attention", "full_attention", "indexed_attention"])
    says = "new: layer 2 is of kind indexed_attention, which kvq does not support: choose a --model whose layers are of"
    with pytest.raises(UsageError, match=says):
        attention_layers(config)

"""Assisted generation over a compressed cache gives the tokens of plain decoding with the same method."""

from __future__ import annotations

import contextlib
import weakref

import pytest
import torch
from method_cases import each_method, ready
from random_artifacts import tiny_model

from kvq_cli.attention.attach import attach
from kvq_cli.attention.replaced_attribute import replaced_attribute
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build, build_parsed

NEW, DRAFTED = 40, 4


def repetitive(columns: int = 43) -> torch.Tensor:
    part = torch.randint(3, 40, (1, 12), generator=torch.Generator().manual_seed(3))
    return part.repeat(1, 1 + columns // 12)[:, :columns]


def generate(model, ids, cache, **options):
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **options}
    return model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **settings)


class Crops:
    """Counts the tokens that `generate` takes back, and those that this unpacks."""

    def __init__(self, cache) -> None:
        self.calls = self.removed = self.unpacked = 0
        self._cache, self._crop = cache, cache.crop
        cache.crop = self

    def __call__(self, tokens) -> None:
        before = self._packed()
        self._crop(tokens)
        self.calls, self.removed = self.calls + 1, self.removed - int(tokens)
        self.unpacked += before - self._packed()

    def _packed(self) -> int:
        return sum(stream.packed_tokens for layer in self._cache.layers for stream in layer.streams)


@pytest.mark.parametrize("prefill", ["exact", "compressed"])
@each_method
def test_prompt_lookup_gives_the_tokens_of_plain_decoding(name, options, prefill):
    """The prompt, too, is the same to methods that are fit to it."""
    model, ids = tiny_model(hidden_size=64), repetitive()
    if "chunk_rank" in options:
        model = model.double()  # in float32, low ranks of the errors of a chunk depend on the order of sums
    with attach(model, ready(name, options, model), prefill=prefill) as kv:
        expected = generate(model, ids, kv.new_cache())
        cache = kv.new_cache()
        crops = Crops(cache)
        assert torch.equal(generate(model, ids, cache, prompt_lookup_num_tokens=DRAFTED), expected)
        assert crops.removed > 0 and crops.unpacked > 0
        assert cache.rollback == DRAFTED and cache.get_seq_length() == ids.shape[1] + NEW - 1


@pytest.mark.parametrize("method", ["kivi:group=8:residual=16:sinks=3", "zipcache:residual=15"])
def test_assistant_model(method):
    """A model whose drafts are partly right."""
    model, assistant, ids = tiny_model(hidden_size=64), tiny_model(hidden_size=64), repetitive(20)
    noise = torch.Generator().manual_seed(1)
    for weight in assistant.parameters():
        weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=noise)
    with attach(model, build_parsed(method)) as kv:
        expected = generate(model, ids, kv.new_cache())
        cache = kv.new_cache()
        crops = Crops(cache)
        assert torch.equal(generate(model, ids, cache, assistant_model=assistant), expected)
        assert crops.removed > 0 and crops.unpacked > 0 and crops.calls < NEW


@pytest.mark.parametrize("method", ["kivi:group=8:sinks=4:recent=6", "innerq:sinks=4:recent=8:group=16"])
def test_sliding_windows(tiny, method):
    """Layers drop what no query sees, also after a rollback."""
    kinds = ["sliding_attention", "full_attention"]
    model, ids = tiny("gemma3", num_hidden_layers=2, layer_types=kinds, sliding_window=17, head_dim=32), repetitive()
    with attach(model, build_parsed(method)) as kv:
        expected = generate(model, ids, kv.new_cache())
        cache = kv.new_cache()
        crops = Crops(cache)
        assert torch.equal(generate(model, ids, cache, prompt_lookup_num_tokens=DRAFTED), expected)
        assert crops.unpacked > 0 and cache.layers[0].dropped > 30 and cache.layers[1].dropped == 0


@pytest.mark.parametrize("drafted", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize(
    "method", ["kivi:group=8:residual=16:sinks=3", "gear:group=8:residual=16", "zipcache:residual=15"]
)
def test_drafted_and_plain_turns_continue_each_other(method, drafted):
    """A second turn passes the whole text on the cache that holds the first."""
    model, more = tiny_model(hidden_size=64), repetitive(9)
    with attach(model, build_parsed(method)) as kv:
        texts = []
        for turns in ((), drafted):
            cache, ids = kv.new_cache(), repetitive()
            for turn in range(2):
                given = {"prompt_lookup_num_tokens": DRAFTED} if turn in turns else {}
                ids = generate(model, ids, cache, max_new_tokens=20, **given)
                ids = torch.cat([ids, more], dim=1)
            texts.append(ids)
            assert cache.get_seq_length() == ids.shape[1] - more.shape[1] - 1
        assert torch.equal(*texts)


def test_a_cache_that_holds_the_whole_text_is_refused():
    model, ids = tiny_model(hidden_size=64), repetitive()
    with attach(model, build("kivi", group=8, residual=16)) as kv:
        cache = kv.new_cache()
        generate(model, ids, cache, max_new_tokens=2)
        with pytest.raises(UsageError, match="the cache holds 44 tokens, the text has 43: pass all of them"):
            generate(model, ids, cache, prompt_lookup_num_tokens=DRAFTED)


def test_outputs_must_be_dicts_where_a_prompt_comes_before_drafted_tokens():
    model, ids = tiny_model(hidden_size=64), repetitive()
    with attach(model, build("kivi", group=8, residual=16)) as kv:
        cache = kv.new_cache()
        cache.activate_past_recording()
        with pytest.raises(UsageError, match="return_dict=True"):
            model(ids, past_key_values=cache, logits_to_keep=DRAFTED, return_dict=False)
        assert cache.get_seq_length() == 0
        whole = model(ids, past_key_values=cache, logits_to_keep=DRAFTED).logits
        drafted = model(ids[:, :DRAFTED], past_key_values=cache, logits_to_keep=DRAFTED, return_dict=False)[0]
        assert drafted.shape == whole.shape


def test_a_pass_that_fails_leaves_no_drafts(monkeypatch):
    """Neither the count of drafted tokens nor the prompt's logits, which may be large."""
    model, ids = tiny_model(hidden_size=64), repetitive()
    freed = []

    class Head(torch.nn.Module):
        def forward(self, hidden):
            if freed:
                raise ZeroDivisionError
            logits = hidden.new_zeros(*hidden.shape[:2], 64)
            freed.append(weakref.ref(logits))
            return logits

    monkeypatch.setattr(model, "lm_head", Head())
    with attach(model, build("kivi", group=8, residual=16)) as kv:
        cache = kv.new_cache()
        cache.activate_past_recording()
        with contextlib.suppress(ZeroDivisionError):
            model(ids, past_key_values=cache, logits_to_keep=DRAFTED)
        assert cache.drafted is None and freed[0]() is None


def test_logits_and_hidden_states_are_those_of_plain_decoding():
    """Hidden states of the prompt: of later tokens, transformers returns some of the first pass twice."""
    model, ids = tiny_model(hidden_size=64), repetitive()
    asked = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    with attach(model, build("kivi", group=8, residual=16, sinks=3)) as kv:
        plain, drafted = (
            generate(model, ids, kv.new_cache(), **asked, **given)
            for given in ({}, {"prompt_lookup_num_tokens": DRAFTED})
        )
    torch.testing.assert_close(torch.stack(drafted.logits), torch.stack(plain.logits), atol=1e-4, rtol=1e-4)
    prompts = (out.hidden_states[0][-1] for out in (drafted, plain))
    torch.testing.assert_close(*prompts, atol=1e-4, rtol=1e-4)


def test_a_model_that_does_not_count_logits_is_refused_before_the_first_token():
    model = tiny_model(hidden_size=64)
    plain = model.forward

    def forward(input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, **kwargs):
        return plain(input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache)

    with replaced_attribute(model, "forward", forward), attach(model, build("kivi", group=8)) as kv:
        cache = kv.new_cache()
        with pytest.raises(UsageError, match="takes no logits_to_keep"):
            generate(model, repetitive(), cache, prompt_lookup_num_tokens=DRAFTED)
        assert cache.get_seq_length() == 0
        generate(model, repetitive(), cache := kv.new_cache(), max_new_tokens=2)
        cache.activate_past_recording()
        with pytest.raises(UsageError, match="another model object"):
            model.model(repetitive(3), past_key_values=cache)

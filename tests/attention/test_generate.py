"""transformers' `generate` over a compressed cache: decoding strategies, crop, reordering."""

from __future__ import annotations

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from kvq_cli.attention.attach import attach
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.methods.window import Window

WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_p": 0.9},
    "beams": {"num_beams": 3},
    "sampled beams": {"num_beams": 2, "do_sample": True},
    "several": {"do_sample": True, "num_return_sequences": 3},
    "chunked": {"prefill_chunk_size": 7},
}


def generate(model, ids, mask, cache=None, **options) -> torch.Tensor:
    torch.manual_seed(5)
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, **options}
    return model.generate(ids, attention_mask=mask, past_key_values=cache, **options)


@pytest.mark.parametrize("prefill", ["exact", "compressed"])
@pytest.mark.parametrize("way", WAYS)
def test_identity_codec_generates_the_same_tokens(tiny, probe, prompt, way, prefill):
    model, (ids, mask) = tiny("llama"), prompt(20, pads=(3, 0))
    options = {k: v for k, v in WAYS[way].items() if k != "prefill_chunk_size"}
    own = generate(model, ids, mask, **options)
    assert len(set(own[0, 20:].tolist())) > 4  # a text, not one word for ever
    with attach(model, probe(codec="identity"), prefill=prefill) as kv:
        assert torch.equal(generate(model, ids, mask, kv.new_cache(), **WAYS[way]), own)


@pytest.mark.parametrize("prefill", ["exact", "compressed"])
@pytest.mark.parametrize("sinks", [0, 5])
@pytest.mark.parametrize("way", ["assistant", "prompt lookup"])
def test_decoding_that_takes_tokens_back_gives_the_same_tokens(tiny, probe, prompt, way, sinks, prefill):
    model, (ids, mask) = tiny("llama"), prompt(20, pads=(3,))
    assistant, noise = tiny("llama"), torch.Generator().manual_seed(1)
    for weight in assistant.parameters():  # another model, of which some tokens are accepted
        weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=noise)
    given = {"assistant_model": assistant} if way == "assistant" else {"prompt_lookup_num_tokens": 3}
    ids[0, 10:] = ids[0, 3:13].clone() if way == "prompt lookup" else ids[0, 10:]
    own = generate(model, ids, mask)
    method = build("fp16") if sinks == 0 else probe(codec="identity", source="post_rope", window=Window(sinks))
    with attach(model, method, prefill=prefill) as kv:
        cache = kv.new_cache()
        crops, crop = [], cache.crop
        cache.crop = lambda tokens: (crops.append(tokens), crop(tokens))
        assert torch.equal(generate(model, ids, mask, cache, **given), own)
        assert sum(crops) < 0 and len(crops) < 24  # tokens were taken back, and others were accepted


def test_beam_scores_equal_those_of_single_sequences(tiny, probe, prompt):
    """After beam search has reordered the cache."""
    model, (ids, mask) = tiny("llama"), prompt(20, pads=(0, 5))
    with attach(model, probe(), prefill="compressed") as kv:
        out = generate(model, ids, mask, kv.new_cache(), num_beams=3, output_scores=True, return_dict_in_generate=True)
        for row, pads in enumerate((0, 5)):
            text = out.sequences[row : row + 1, pads:]
            scores = model(text, past_key_values=kv.new_cache()).logits.log_softmax(-1)[0, :-1]
            chosen = scores.gather(1, text[0, 1:, None])[19 - pads :].sum()
            new = text.shape[1] - (20 - pads)
            torch.testing.assert_close(out.sequences_scores[row], chosen / new, atol=1e-4, rtol=1e-4)


def test_generation_continues_from_the_cache(tiny, probe, prompt):
    model, (ids, mask) = tiny("llama"), prompt(20)
    with attach(model, probe(), prefill="compressed") as kv:
        whole = generate(model, ids, mask, kv.new_cache(), max_new_tokens=24)
        cache = kv.new_cache()
        part = generate(model, ids, mask, cache, max_new_tokens=10)
        both = generate(model, part, torch.ones_like(part), cache, max_new_tokens=14)
    assert torch.equal(both, whole)


def test_crop_removes_tokens_that_are_not_packed(tiny, probe, prompt):
    model, (ids, _) = tiny("llama"), prompt(25)
    with attach(model, probe(window=Window(4, 6, 4)), prefill="compressed") as kv:
        cache, fresh = kv.new_cache(), kv.new_cache()
        model(ids, past_key_values=cache)
        with pytest.raises(UsageError, match=r"have packed others.*new_cache\(rollback=4\)"):
            cache.crop(-4)  # 4 sinks, 12 packed, 9 recent; of 21 tokens, 8 would be packed
        cache.crop(-3)
        assert cache.get_seq_length() == 22
        again = model(ids[:, 22:], past_key_values=cache).logits
        model(ids[:, :22], past_key_values=fresh)
        torch.testing.assert_close(again, model(ids[:, 22:], past_key_values=fresh).logits)
        with pytest.raises(UsageError, match="negative"):
            cache.crop(5)
        assert cache.get_seq_length() == 25  # a refused crop changes nothing
        cache.crop(0)


def test_rows_can_be_repeated_and_selected(tiny, probe, prompt):
    model, (ids, mask) = tiny("llama"), prompt(20, pads=(0, 6))
    word, more = torch.tensor([[5], [9]]), torch.ones(2, 1, dtype=mask.dtype)
    with attach(model, probe(), prefill="compressed") as kv:
        cache = kv.new_cache()
        model(ids, attention_mask=mask, past_key_values=cache)
        cache.batch_repeat_interleave(3)
        assert cache.batch_size == 6
        cache.batch_select_indices(torch.tensor([4, 0]))
        swapped = model(word.flip(0), attention_mask=torch.cat([mask, more], 1).flip(0), past_key_values=cache).logits
        cache.reset()
        model(ids, attention_mask=mask, past_key_values=cache)
        straight = model(word, attention_mask=torch.cat([mask, more], 1), past_key_values=cache).logits
    torch.testing.assert_close(swapped.flip(0), straight)


def test_generation_stops_at_strings(tiny, probe, prompt):
    """transformers hands the tokenizer on to the attention functions."""
    model, (ids, mask) = tiny("llama"), prompt(20)
    words = {f"word{i}.": i for i in range(97)} | {"abcdef": 97}  # by which transformers finds where a word begins
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="word0.")))
    own = generate(model, ids, mask)
    stop = {"stop_strings": [f"word{own[0, 29]}."], "tokenizer": tokenizer}
    expected = generate(model, ids, mask, **stop)
    assert expected.shape[1] < own.shape[1]
    with attach(model, probe(codec="identity")) as kv:
        assert torch.equal(generate(model, ids, mask, **stop), expected)
        assert torch.equal(generate(model, ids, mask, kv.new_cache(), **stop), expected)


def test_keywords_that_change_no_attention_are_passed_on(tiny, probe, prompt):
    """As for the loss of a batch that is accumulated, or of experts."""
    model, (ids, _) = tiny("llama"), prompt(20)
    options = {"labels": ids, "num_items_in_batch": torch.tensor(7), "output_router_logits": True, "unknown": 3}
    expected = model(ids, **options)
    with attach(model, probe()) as kv:
        plain, compressed = model(ids, **options), model(ids, past_key_values=kv.new_cache(), **options)
    for found in (plain, compressed):
        assert torch.equal(found.loss, expected.loss) and torch.equal(found.logits, expected.logits)


def test_passes_without_a_compressed_cache_may_train(tiny, probe, prompt):
    model, (ids, _), losses = tiny("llama", attention_dropout=0.3), prompt(20), []
    with attach(model, probe()) as kv:
        model.train()
        for _ in range(2):
            torch.manual_seed(0)
            losses.append(model(ids, labels=ids).loss)
            model.set_attn_implementation("sdpa")
        model.set_attn_implementation("kvq")
        with pytest.raises(UsageError, match="dropout"):
            model(ids, past_key_values=kv.new_cache())
    assert torch.equal(*losses) and losses[0] != model.eval()(ids, labels=ids).loss


def test_keywords_that_change_attention_are_refused(tiny, probe, prompt):
    """Several texts in one row, which flash attention tells apart by these."""
    model, (ids, _) = tiny("llama"), prompt(20)
    with attach(model, probe()) as kv, pytest.raises(UsageError, match="cu_seq_lens_q"):
        model(ids, past_key_values=kv.new_cache(), cu_seq_lens_q=torch.tensor([0, 12, 20]))

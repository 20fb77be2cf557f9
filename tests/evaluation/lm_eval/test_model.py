"""The `lm_eval` model: log-likelihoods and answers with a compressed cache."""

import copy
import dataclasses

import pytest
import torch
from lm_eval.api.instance import Instance
from tokenizers.processors import Sequence

from kvq_cli.attention.attach import attach
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.evaluation.lm_eval.model import AttachedLM, mean_cache_record
from kvq_cli.methods.registry import build
from kvq_cli.reference import prose

TEXT = prose("evaluation")
EXACT, KIVI = build("fp16"), build("kivi", bits=2, residual=32)


def requests(kind, arguments):
    return [Instance(kind, {}, one, index, (kind, index, 1)) for index, one in enumerate(arguments)]


def words(start, end):
    """Whole words: lm-eval gives the blank at a context's end to the continuation."""
    return " ".join(TEXT[start:end].split()[1:-1])


PAIRS = requests(
    "loglikelihood",
    [
        (words(0, 700), " a and"),
        (words(0, 700), " the light of the morning"),
        (words(1000, 1300), " or"),
        (words(1000, 1300), " in"),
        (words(2000, 2100), " nothing more"),
    ],
)


def run(loaded, method, kind, instances, **options):
    with attach(loaded.model, method, prefill="compressed") as attached:
        model = AttachedLM(loaded, attached, **options)
        return getattr(model, kind)(instances, disable_tqdm=True), model


@torch.inference_mode()
def one_by_one(loaded, method, context, continuation):
    """ln p of a continuation, decoded token by token."""
    ids = loaded.tokenizer(context + continuation).input_ids
    start = len(loaded.tokenizer(context).input_ids)
    total, greedy = 0.0, True
    with attach(loaded.model, method, backend="torch") as attached:
        cache = attached.new_cache()
        for place, token in enumerate(ids[:-1]):
            log_p = loaded.model(torch.tensor([[token]]), past_key_values=cache).logits[0, -1].float().log_softmax(-1)
            if place + 1 >= start:
                total += float(log_p[ids[place + 1]])
                greedy &= int(log_p.argmax()) == ids[place + 1]
    return total, greedy


def test_fp16_log_likelihoods_equal_the_plain_model(loaded):
    found, _ = run(loaded, EXACT, "loglikelihood", PAIRS)
    for (context, continuation), (total, greedy) in zip((one.args for one in PAIRS), found, strict=True):
        ids = loaded.tokenizer(context + continuation, return_tensors="pt").input_ids
        start = len(loaded.tokenizer(context).input_ids)
        with torch.inference_mode():
            log_p = loaded.model(ids).logits[0, :-1].log_softmax(-1)
        wanted = log_p.gather(1, ids[0, 1:, None])[start - 1 :].sum()
        assert total == pytest.approx(float(wanted), abs=1e-3)
        assert greedy == bool((log_p.argmax(-1) == ids[0, 1:])[start - 1 :].all())


def test_log_likelihoods_equal_token_by_token_decoding(loaded):
    found, model = run(loaded, KIVI, "loglikelihood", PAIRS)
    exact, plain = run(loaded, EXACT, "loglikelihood", PAIRS)
    for one, compressed in list(zip(PAIRS, found, strict=True))[2:]:  # the shorter ones
        total, greedy = one_by_one(loaded, KIVI, *one.args)
        assert compressed[0] == pytest.approx(total, abs=1e-3) and compressed[1] == greedy
    assert max(abs(a[0] - b[0]) for a, b in zip(found, exact, strict=True)) > 0.05
    assert mean_cache_record(model.cache_records)["bytes"] < 0.6 * mean_cache_record(plain.cache_records)["bytes"]
    assert mean_cache_record(model.cache_records)["compressed"] > 50


def test_packed_bits_of_batches_without_packed_tokens_do_not_count():
    kinds = [(100, 60, 3.0, 2), (20, 0, 0.0, 4), (80, 40, 2.5, 1)]
    batches = [({"tokens": n, "compressed": packed, "packed_bits": bits}, rows) for n, packed, bits, rows in kinds]
    mean = mean_cache_record(batches)
    assert mean["packed_bits"] == pytest.approx((2 * 60 * 3.0 + 40 * 2.5) / (2 * 60 + 40))
    assert mean["tokens"] == pytest.approx((2 * 100 + 4 * 20 + 80) / 7)
    assert mean_cache_record(batches[1:2])["packed_bits"] == 0


def test_log_likelihoods_do_not_depend_on_padding_and_order(loaded):
    alone, _ = run(loaded, KIVI, "loglikelihood", PAIRS)
    together, _ = run(loaded, KIVI, "loglikelihood", PAIRS[::-1], batch_size=4)
    assert [total for total, _ in together[::-1]] == pytest.approx([total for total, _ in alone], abs=1e-3)


def test_padding_of_a_batch_stays_within_the_models_context(loaded, monkeypatch):
    """Choices of unequal length behind contexts that were truncated, and the last, shorter window of a text."""
    monkeypatch.setattr(loaded.model.config, "max_position_embeddings", 128)
    for kind, asked in (
        ("loglikelihood", PAIRS),
        ("loglikelihood_rolling", requests("loglikelihood_rolling", [(TEXT[:1200],)])),
    ):
        alone, _ = run(loaded, KIVI, kind, asked)
        together, model = run(loaded, KIVI, kind, asked, batch_size=4)
        assert max(rows for _, rows in model.cache_records) > 1
        totals = [[one if isinstance(one, float) else one[0] for one in found] for found in (alone, together)]
        assert totals[1] == pytest.approx(totals[0], abs=1e-3)


def test_single_token_choices_share_a_forward_pass(loaded):
    letters = requests("loglikelihood", [(words(0, 300), letter) for letter in (" A", " B", " C")])
    assert {len(loaded.tokenizer(one.args[1], add_special_tokens=False).input_ids) for one in letters} == {1}
    found, model = run(loaded, KIVI, "loglikelihood", letters)
    assert sum(rows for _, rows in model.cache_records) == 1 and len({total for total, _ in found}) == 3
    assert sum(found_greedy for _, found_greedy in found) <= 1


def test_long_text_is_scored_in_windows(loaded):
    text = requests("loglikelihood_rolling", [(TEXT[:600],)])
    (total,), _ = run(loaded, EXACT, "loglikelihood_rolling", text, max_length=64)
    ids = loaded.tokenizer(TEXT[:600]).input_ids
    expected = 0.0
    for start in range(0, len(ids), 64):
        window = ids[start : start + 64]
        # The last token before the window, or the first token that texts have, predicts the window's first; the last
        # window is filled up from the left, and what is predicted already does not count again.
        first = max(0, start + len(window) - 64) - 1 if start else -1
        inputs = [loaded.tokenizer.bos_token_id, *ids[:63]] if start == 0 else ids[first : start + len(window) - 1]
        with torch.inference_mode():
            log_p = loaded.model(torch.tensor([inputs])).logits[0].log_softmax(-1)
        expected += float(log_p[-len(window) :].gather(1, torch.tensor(window)[:, None]).sum())
    assert total == pytest.approx(expected, abs=2e-3)


def test_text_without_tokens_is_an_error(loaded):
    tokenizer = loaded.tokenizer
    assert tokenizer("").input_ids == [tokenizer.bos_token_id]
    without = dataclasses.replace(loaded, tokenizer=copy.deepcopy(tokenizer))
    without.tokenizer.backend_tokenizer.post_processor = Sequence([])
    assert without.tokenizer("").input_ids == []
    empty = requests("loglikelihood_rolling", [("",)])
    assert run(loaded, EXACT, "loglikelihood_rolling", empty)[0][0] < 0
    with pytest.raises(KvqError, match="the text '' has no tokens to score"):
        run(without, EXACT, "loglikelihood_rolling", empty)


def test_answers_are_greedy_and_end_at_stop_strings(loaded):
    prompt = TEXT[:500]
    ids = loaded.tokenizer(prompt, return_tensors="pt").input_ids
    plain = loaded.model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
    text = loaded.tokenizer.decode(plain, skip_special_tokens=True)
    stop = text[len(text) // 2 :][:3]
    options = {"until": [stop], "max_gen_toks": 12, "do_sample": False, "temperature": 1}
    asked = requests("generate_until", [(prompt, options), (prompt, {"max_gen_toks": 12}), (TEXT[:90], options)])
    found, model = run(loaded, EXACT, "generate_until", asked, batch_size=2)
    assert found[:2] == [text.split(stop)[0], text] and stop not in found[2]
    compressed, packed = run(loaded, KIVI, "generate_until", asked, batch_size=2)
    assert compressed[1] != text
    assert mean_cache_record(packed.cache_records)["bytes"] < mean_cache_record(model.cache_records)["bytes"]


@pytest.mark.parametrize(("truncation", "head"), [("left", 0), ("middle", 25)])
def test_long_prompts_are_truncated_left_or_in_the_middle(loaded, monkeypatch, truncation, head):
    seen = []

    def watch(loaded, attached, prompts, budget, stops=(), sampler=None):
        seen.extend(prompts)
        raise KeyboardInterrupt

    monkeypatch.setattr("kvq_cli.evaluation.lm_eval.model.generate_answers", watch)
    asked = requests("generate_until", [(TEXT[:900], {"max_gen_toks": 14})])
    with pytest.raises(KeyboardInterrupt):
        run(loaded, KIVI, "generate_until", asked, max_length=64, truncation=truncation)
    ids = loaded.tokenizer(TEXT[:900]).input_ids
    assert seen == [ids[:head] + ids[len(ids) - 50 + head :]]
    with attach(loaded.model, KIVI) as attached:
        model = AttachedLM(loaded, attached, max_length=64, truncation=truncation)
        assert model.prompt_tokens(asked[0]) == (len(ids), len(ids) - 50)


def test_sampled_answers_depend_on_the_seed_the_document_and_the_repeat_alone(loaded):
    options = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "max_gen_toks": 12}
    asked = requests("generate_until", [(TEXT[:500], options), (TEXT[600:900], options)])
    repeated = [asked[0], asked[0], asked[1]]
    together, _ = run(loaded, EXACT, "generate_until", repeated, batch_size=3)
    alone, _ = run(loaded, EXACT, "generate_until", repeated)
    other, _ = run(loaded, EXACT, "generate_until", repeated, seed=1)
    greedy, _ = run(loaded, EXACT, "generate_until", requests("generate_until", [(TEXT[:500], {"max_gen_toks": 12})]))
    assert together == alone and len({*alone[:2], *other[:2], *greedy}) == 5
    nearly, _ = run(loaded, build("kivi", bits=8), "generate_until", repeated)
    assert nearly == alone  # the same noise: another token needs other probabilities


def test_unknown_options_and_too_long_answers_are_refused(loaded):
    for options, message in (
        ({"num_beams": 4}, "num_beams"),
        ({"max_gen_toks": 4096}, "no room for a prompt in 2048"),
    ):
        with pytest.raises(UsageError, match=message):
            run(loaded, KIVI, "generate_until", requests("generate_until", [("a", options)]))
    with pytest.raises(UsageError, match="--max-length 4096: the context length of tiny is 2048"):
        run(loaded, KIVI, "loglikelihood", PAIRS, max_length=4096)

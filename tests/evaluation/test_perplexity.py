"""Perplexity and divergence of a cache, against transformers' own forward pass and against decoding token by token."""

import math
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy

from kvq_cli.attention.attach import attach
from kvq_cli.data.texts import token_windows, unknown_token
from kvq_cli.evaluation.compared_methods import compared_methods
from kvq_cli.evaluation.perplexity import PerplexityEvaluation
from kvq_cli.evaluation.settings import EvaluationSettings, build_evaluations
from kvq_cli.methods.registry import build
from kvq_cli.reference import prose

SEQLEN, PROMPT = 160, 64


@pytest.fixture(scope="module")
def windows(tokenizer):
    return token_windows(tokenizer, prose("evaluation")[:8000], SEQLEN)


@pytest.fixture(scope="module")
def records(loaded, windows):
    """Records of three windows, by the method's label."""
    evaluation = PerplexityEvaluation(windows, "test", 3, PROMPT, "compressed")
    found = {}
    for method in (build("fp16"), build("kivi", bits=2, residual=32), build("kivi", bits=4, residual=32)):
        label = compared_methods([method])[0].label
        with attach(loaded.model, method, prefill="compressed") as attached:
            found[label] = [one for _, some in evaluation.run(loaded, {"": attached}, {"": [0, 1, 2]}) for one in some]
    return found


def test_windows_are_cut_as_in_gptq(windows, tokenizer):
    ids = tokenizer(prose("evaluation")[:8000]).input_ids
    assert windows.shape == (len(ids) // SEQLEN, SEQLEN)
    assert windows.flatten().tolist() == ids[: windows.numel()]


def test_fp16_perplexity_equals_a_plain_forward_pass(loaded, windows, records):
    losses = []
    for window in windows[:3]:
        logits = loaded.model(window[None]).logits[0]
        losses.append(cross_entropy(logits[PROMPT - 1 : -1].double(), window[PROMPT:]).item())
    expected = math.exp(sum(losses) / 3)
    metrics = PerplexityEvaluation(windows, "test", 3, PROMPT, "compressed").metrics(records["fp16"])
    assert metrics["perplexity_uncompressed,none"] == pytest.approx(expected, rel=1e-6)
    assert metrics["perplexity,none"] == pytest.approx(expected, rel=1e-5)
    assert metrics["kl,none"] == pytest.approx(0, abs=1e-6)
    assert metrics["top1,none"] == 1.0
    spread = torch.tensor(losses, dtype=torch.float64).std().item() / math.sqrt(3)
    assert metrics["perplexity_stderr,none"] == pytest.approx(expected * spread, rel=1e-3)


def test_divergence_grows_with_fewer_bits(records):
    kl = {label: sum(one["kl"] for one in some) for label, some in records.items()}
    assert kl["kivi-2bit"] > 2 * kl["kivi-4bit"] > 0.002
    assert all(one["agreeing"] <= one["tokens"] == SEQLEN - PROMPT for some in records.values() for one in some)


def test_scored_pass_equals_token_by_token_decoding(loaded, windows, records):
    """The score of one forward pass is that of a cache that grows, and is compressed, one token at a time."""
    with attach(loaded.model, build("kivi", bits=2, residual=32)) as attached, torch.inference_mode():
        cache = attached.new_cache()
        steps = [loaded.model(token[None, None], past_key_values=cache).logits[0, -1] for token in windows[0]]
    logits = torch.stack(steps)
    nll = cross_entropy(logits[PROMPT - 1 : -1], windows[0][PROMPT:], reduction="sum").item()
    record = records["kivi-2bit"][0]
    assert record["nll"] == pytest.approx(nll, rel=1e-4)
    assert record["nll_reference"] != pytest.approx(nll, rel=1e-3)


def test_records_have_cache_bytes(records, loaded):
    shape = loaded.shape
    cached = SEQLEN - 1  # the last token is scored, and not decoded
    plain = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim * cached
    for label, some in records.items():
        cache = some[0]["cache"]
        assert (cache["tokens"], cache["fp16_bytes"]) == (cached, plain)
        assert (cache["bytes"] < plain) == (label != "fp16")
        assert cache["nominal_bits"] == {"fp16": 16, "kivi-2bit": 2, "kivi-4bit": 4}[label]


def test_unknown_tokens_of_a_text_are_not_scored(loaded, windows, records):
    """WikiText-2 writes `<unk>` for rare words, and tokenizers have that token."""
    text = windows[:2].clone()
    text[:, PROMPT + 5 :: 3] = unknown = 9
    evaluation = PerplexityEvaluation(text, "test", None, PROMPT, "compressed", unscored=unknown)
    with attach(loaded.model, build("fp16"), prefill="compressed") as attached:
        found = [one for _, some in evaluation.run(loaded, {"": attached}, {"": [0, 1]}) for one in some]
    for record, window in zip(found, text, strict=True):
        targets = window[PROMPT:]
        losses = cross_entropy(loaded.model(window[None]).logits[0, PROMPT - 1 : -1], targets, reduction="none")
        kept = losses[targets != unknown]
        assert record["tokens"] == len(kept) < len(targets) - 30
        assert record["nll"] == pytest.approx(kept.sum().item(), rel=1e-4)
        assert record["nll_reference"] == pytest.approx(kept.sum().item(), rel=1e-4)


def test_samples_of_texts_without_unknown_tokens_keep_their_keys(windows):
    plain, unscored = (
        PerplexityEvaluation(windows, "test", 3, PROMPT, "exact", unscored=token) for token in (None, -1)
    )
    assert plain.config == unscored.config
    ending = windows.clone()
    ending[0, -1] = 9
    assert PerplexityEvaluation(ending, "test", 3, PROMPT, "exact", unscored=9).config["unscored_token"] == 9


def test_a_window_of_unknown_tokens_alone_is_scored(loaded, windows):
    evaluation = PerplexityEvaluation(windows[:1].clone().fill_(9), "test", 1, PROMPT, "exact", unscored=9)
    with attach(loaded.model, build("fp16"), prefill="exact") as attached:
        [(_, [record])] = evaluation.run(loaded, {"": attached}, {"": [0]})
    assert record["tokens"] == SEQLEN - PROMPT


@pytest.mark.parametrize(("bos", "eos", "found"), [(1, 2, 3), (3, 2, None), (1, 3, None), (None, None, 3)])
def test_the_unknown_token_is_none_that_begins_or_ends_texts(bos, eos, found):
    assert unknown_token(SimpleNamespace(unk_token_id=3, bos_token_id=bos, eos_token_id=eos)) == found


def test_settings_name_the_unknown_token(loaded):
    """But not for text that the model itself samples."""
    tokenizer = deepcopy(loaded.tokenizer)
    tokenizer.add_special_tokens({"unk_token": "a"})
    of_it = replace(loaded, tokenizer=tokenizer)
    [read], [sampled] = (
        build_evaluations(EvaluationSettings(["perplexity"], seqlens=[16], samples=1, datasets=[name]), of_it, None)
        for name in ("prose", "self")
    )
    assert read.config["unscored_token"] == tokenizer.convert_tokens_to_ids("a")
    assert "unscored_token" not in sampled.config

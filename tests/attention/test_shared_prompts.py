"""A prompt's pass that is computed once for all methods stores the same bits as a pass of each method's own."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
import torch
import transformers
from model_matrix import FAMILIES, ready_method, small_method, tiny_model
from tiers import slow

from kvq_cli.attention import shared_prompts
from kvq_cli.attention.attach import attach
from kvq_cli.attention.capture_points import decoder_of
from kvq_cli.attention.shared_prompts import SharedPrompts
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.evaluation.scoring import continuation_logits
from kvq_cli.methods.registry import build, method_names

#: Plain; several rotary embeddings; sliding windows, layers without RoPE; sink logits; no RoPE; fused projections.
FIRST = ("llama", "gemma3_text", "cohere2", "gpt_oss", "gpt2", "phi3")
MORE = [build("innerq", bits=2, mode="hybrid_prefill", group=16, sinks=2, recent=4)]


@pytest.fixture
def passes(monkeypatch):
    """Passes of each decoder: numbers of columns."""

    def count(model):
        found = []

        def hook(_module, args, kwargs):
            found.append((args[0] if args else kwargs["input_ids"]).shape[1])

        hooks.append(decoder_of(model).register_forward_pre_hook(hook, with_kwargs=True))
        return found

    hooks = []
    yield count
    for hook in hooks:
        hook.remove()


def texts(rows: int = 2):
    """Contexts of different lengths, so that the batch is padded, and continuations."""
    noise = torch.Generator().manual_seed(3)
    contexts = [torch.randint(3, 97, (31 - 6 * row,), generator=noise).tolist() for row in range(rows)]
    return contexts, [torch.randint(3, 97, (9,), generator=noise).tolist() for _ in range(rows)]


def supported(model, undo):
    """All methods that the model supports, attached."""
    attached = {}
    for method in [*map(small_method, method_names()), *MORE]:
        try:
            attached[method] = undo.enter_context(attach(model, ready_method(model, method)))
        except KvqError:
            assert method.name not in ("fp16", "kivi", "squat", "gear", "zipcache", "innerq")
    return attached


@pytest.mark.parametrize(
    "family", [*FIRST, *slow(*(name for name in FAMILIES if name not in FIRST and name in transformers.CONFIG_MAPPING))]
)
def test_shared_prompt_gives_the_same_bits(family, passes):
    model = tiny_model(family, **FAMILIES[family])
    with ExitStack() as undo:
        attached = supported(model, undo)
        alone = {method: continuation_logits(each, *texts()) for method, each in attached.items()}
        found, plain, replaced = passes(model), model.forward, model.__dict__.get("forward")
        prompts = SharedPrompts([*attached.values()])
        for method, each in attached.items():
            with prompts.used_by(each):
                logits, report = continuation_logits(each, *texts())
            for own, shared in zip(alone[method][0], logits, strict=True):
                assert torch.equal(own, shared), method.name
            assert report == alone[method][1]
        assert model.forward == plain and model.__dict__.get("forward") is replaced
    # Columns of one prompt, or that of each method where layers hold other states, and of each method's continuation,
    # which kvtc computes in several passes.
    prompts = len(attached) if any(each.has_states for each in attached.values()) else 1
    assert found[:2] == [30, 9] and sum(found) == 30 * prompts + 9 * len(attached)
    assert any(report.compressed for _, report in alone.values())


def test_generation_continues_a_shared_prompt(passes):
    model = tiny_model("llama")
    ids = torch.tensor([texts(1)[0][0]])
    with attach(model, build("fp16")) as first, attach(model, small_method("kivi")) as second:
        found, prompts = passes(model), SharedPrompts([first, second])
        for each in (first, second):
            options = {"max_new_tokens": 8, "do_sample": False, "output_scores": True, "return_dict_in_generate": True}
            alone = model.generate(ids, past_key_values=each.new_cache(), **options)
            with prompts.used_by(each):
                shared = model.generate(ids, past_key_values=each.new_cache(), **options)
            assert torch.equal(alone.sequences, shared.sequences)
            assert all(torch.equal(*scores) for scores in zip(alone.scores, shared.scores, strict=True))
            assert each.hooks.owns(shared.past_key_values)
    assert found.count(ids.shape[1]) == 3  # alone twice, shared once


@pytest.mark.parametrize("change", ["ids", "logits", "prefill", "one method", "room", "hidden states"])
def test_other_passes_run_the_model(change, passes, monkeypatch):
    model, ids = tiny_model("llama"), torch.tensor([texts(1)[0][0]])
    if change == "room":
        monkeypatch.setattr(shared_prompts, "MAX_BYTES", 100)
    prefill = "compressed" if change == "prefill" else "exact"
    with attach(model, build("fp16")) as first, attach(model, small_method("kivi"), prefill=prefill) as second:
        prompts = SharedPrompts([second] if change == "one method" else [first, second])
        found, options = passes(model), {"output_hidden_states": True} if change == "hidden states" else {}
        with prompts.used_by(first), torch.no_grad():
            model(ids, past_key_values=first.new_cache(), **options)
        if change == "ids":
            ids = ids + 0
            ids[0, 4] += 1
        elif change == "logits":
            options = {"logits_to_keep": 1}
        with torch.no_grad():
            alone = model(ids, past_key_values=second.new_cache(), **options)
            with prompts.used_by(second):
                shared = model(ids, past_key_values=second.new_cache(), **options)
        assert torch.equal(alone.logits, shared.logits)
    assert found == [ids.shape[1]] * 3
    assert first.hooks.newest is None and second.hooks.newest is None  # no cache is kept while other methods run


def test_rope_that_changes_with_the_length_is_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = tiny_model("llama", rope_parameters=rope)
    ids, before_rope = torch.tensor([texts(1)[0][0]]), build("kivi", bits=2, group=16, residual=16, pre_rope=True)
    with torch.no_grad(), attach(model, build("fp16")) as first, attach(model, before_rope) as second:
        rotary = model.model.rotary_emb  # shortened after `attach`, which would refuse the prompt as too long
        rotary.config.max_position_embeddings = 16
        for name in ("original_max_seq_len", "max_seq_len_cached"):
            setattr(rotary, name, 16)
        prompts = SharedPrompts([first, second])
        with prompts.used_by(first):
            model(ids, past_key_values=first.new_cache())
        with prompts.used_by(second), pytest.raises(UsageError, match="RoPE changes with the length"):
            model(ids, past_key_values=second.new_cache())

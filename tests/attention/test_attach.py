"""Attached models: logits equal the model's with an identity codec, on every family and by every path."""

from __future__ import annotations

import copy

import pytest
import torch

from kvq_cli.attention.attach import attach
from kvq_cli.methods.registry import build
from kvq_cli.methods.window import Window

FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma3": {"layer_types": ["full_attention"] * 3},
    "olmo2": {},
    "glm": {},
    "cohere": {"use_qk_norm": True},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "gpt_neox": {"rotary_pct": 0.5},
    "persimmon": {},
    "gpt2": {},
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 64},
    "gemma2": {"attn_logit_softcapping": 2.0, "sliding_window": 7},
    "gptoss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 7},
}
SLIDING = {
    "mistral": {"sliding_window": 9},
    "gemma3": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "qwen3": {
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "phi3": {"sliding_window": 1},
}
CASES = [(family, options) for table in (FAMILIES, SLIDING) for family, options in table.items()]
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)


def logits(model, ids, mask, cache, chunk: int) -> torch.Tensor:
    """Logits of all columns, fed `chunk` at a time, with the positions that `generate` uses."""
    positions, outs = (mask.cumsum(1) - 1).clamp(min=0), []
    for begin in range(0, ids.shape[1], chunk):
        end = min(begin + chunk, ids.shape[1])
        outs.append(
            model(
                ids[:, begin:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, begin:end],
                past_key_values=cache,
            ).logits
        )
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize("source", ["post_rope", "pre_rope"])
@pytest.mark.parametrize("family, options", CASES)
def test_identity_codec_gives_the_logits_of_the_model(tiny, probe, prompt, family, options, source):
    model = tiny(family, **options)
    ids, mask = prompt(20, pads=(6, 0))
    real = mask.bool()
    own = logits(model, ids, mask, None, 20)[real]
    method = probe(source=source, codec="identity", window=Window(3, 2, 4), value_window=Window(1, 0, 2))
    for prefill, chunk in (("exact", 20), ("compressed", 20), ("compressed", 1), ("exact", 7)):
        with attach(model, method, prefill=prefill) as kv:
            cache = kv.new_cache()
            close(logits(model, ids, mask, cache, chunk)[real], own)
            assert cache.report().compressed > 0


def test_yarn_rotation(tiny, probe, prompt):
    model = tiny("llama", rope_parameters=YARN)
    ids, mask = prompt(30)
    with attach(model, probe(codec="identity"), prefill="compressed") as kv:
        close(logits(model, ids, mask, kv.new_cache(), 1), model(ids).logits)


@pytest.mark.parametrize("family, options", [*FAMILIES.items(), ("gemma3", SLIDING["gemma3"])])
def test_compressed_prefill_equals_token_by_token(tiny, probe, prompt, family, options):
    model = tiny(family, **options)
    ids, mask = prompt(25, pads=(0, 9))
    real, method = mask.bool(), probe(window=Window(3, 0, 4), value_window=Window(2, 5, 4))
    with attach(model, method, prefill="compressed") as kv:
        whole, *others = (logits(model, ids, mask, kv.new_cache(), chunk)[real] for chunk in (25, 1, 13))
    for other in others:
        close(other, whole)
    own = model(ids, attention_mask=mask).logits[real]
    assert (whole - own).abs().max() > 0.01  # compression was seen at all


@pytest.mark.parametrize("name, options", [("kivi", {}), ("kivi", {"pre_rope": True, "sinks": 4, "recent": 6})])
def test_compressed_prefill_of_methods_equals_token_by_token(tiny, prompt, name, options):
    model = tiny("llama")
    ids, mask = prompt(60, pads=(0, 11))
    method = build(name, group=8, **{"residual": 16, **options})
    with attach(model, method, prefill="compressed") as kv:
        whole, single = (logits(model, ids, mask, kv.new_cache(), chunk)[mask.bool()] for chunk in (60, 1))
    # Where rounding of the activations flips a code, one number moves by a whole step: rare, and small.
    error = (single - whole).abs()
    assert error.quantile(0.9) < 1e-4 and error.max() < 0.05 * whole.abs().max()


@pytest.mark.parametrize("prefill", ["exact", "compressed"])
def test_left_padded_batch_equals_single_rows(tiny, probe, prompt, prefill):
    model = tiny("llama")
    ids, mask = prompt(40, pads=(9, 0, 21))
    with attach(model, probe(), prefill=prefill) as kv:
        batch = logits(model, ids, mask, kv.new_cache(), 35)
        for row, pads in enumerate((9, 0, 21)):
            cache = kv.new_cache()
            first = logits(model, ids[row : row + 1, pads:35], mask[row : row + 1, pads:35], cache, 40)
            rest = model(ids[row : row + 1, 35:], past_key_values=cache).logits
            close(batch[row, pads:], torch.cat([first, rest], dim=1)[0])


def test_positions_that_count_pads(tiny, probe, prompt):
    """Without position_ids, pads are counted: RoPE depends on differences only, so the logits are the same."""
    model = tiny("llama")
    ids, mask = prompt(24, pads=(5,))
    with attach(model, probe(), prefill="compressed") as kv:
        by_token = logits(model, ids, mask, kv.new_cache(), 24)
        by_column = model(ids, attention_mask=mask, past_key_values=kv.new_cache()).logits
    close(by_column[:, 5:], by_token[:, 5:])


def test_hooks_and_functions_are_restored_after_the_block(tiny, probe, prompt):
    model, (ids, _) = tiny("llama"), prompt(20)
    before, own = copy.deepcopy(model.config.to_dict()), model(ids).logits

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    with pytest.raises(RuntimeError, match="stop"), attach(model, probe()) as kv:
        model(ids, past_key_values=kv.new_cache())
        assert hooks()
        raise RuntimeError("stop")
    assert hooks() == 0
    assert model.config.to_dict() == before and model.config._attn_implementation == "sdpa"
    assert torch.equal(model(ids).logits, own)


@pytest.mark.parametrize("kind", ["forward", "forward_pre"])
def test_no_hook_stays_where_one_cannot_be_registered(tiny, probe, kind, monkeypatch):
    """Each of the hooks fails once: those of the probing pass, then those of the block."""
    model, register, left = tiny("llama"), getattr(torch.nn.Module, f"register_{kind}_hook"), 0

    def failing(*args, **kwargs):
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("no more hooks")
        return register(*args, **kwargs)

    monkeypatch.setattr(torch.nn.Module, f"register_{kind}_hook", failing)
    for allowed in range(100):
        left = allowed
        try:
            with attach(model, probe()):
                break
        except RuntimeError:
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()), allowed
    assert 3 < allowed < 99  # more than the one of each layer that probing registers


def test_without_a_compressed_cache_logits_are_unchanged(tiny, probe, prompt):
    model, (ids, mask) = tiny("llama"), prompt(20, pads=(0, 4))
    own = model(ids, attention_mask=mask).logits
    with attach(model, probe(), prefill="compressed"):
        assert torch.equal(model(ids, attention_mask=mask).logits, own)
        assert torch.equal(model(ids, attention_mask=mask, use_cache=False).logits, own)


@pytest.mark.parametrize("family", ["gemma2", "gptoss"])
def test_without_a_compressed_cache_softcap_and_sinks_apply(tiny, probe, prompt, family):
    model, (ids, mask) = tiny(family, **FAMILIES[family]), prompt(20, pads=(0, 4))
    own = model(ids, attention_mask=mask).logits[mask.bool()]
    with attach(model, probe()):
        close(model(ids, attention_mask=mask).logits[mask.bool()], own)


def test_nested_attaches_are_independent(tiny, probe, prompt):
    model, (ids, mask) = tiny("llama"), prompt(30)
    with attach(model, probe(codec="identity"), prefill="compressed") as outer:
        one = logits(model, ids, mask, outer.new_cache(), 30)
        with attach(model, probe(), prefill="compressed") as inner:
            two = logits(model, ids, mask, inner.new_cache(), 30)
            assert torch.equal(logits(model, ids, mask, outer.new_cache(), 30), one)
        assert torch.equal(logits(model, ids, mask, outer.new_cache(), 30), one)
    close(one, model(ids).logits)
    assert (two - one).abs().max() > 0.01


def test_bfloat16_model(tiny, probe, prompt):
    model, (ids, mask) = tiny("llama").bfloat16(), prompt(40)
    own = model(ids).logits.float()
    with attach(model, probe(codec="identity"), prefill="compressed") as kv:
        cache = kv.new_cache()
        error = (logits(model, ids, mask, cache, 40).float() - own).abs().max()
        assert cache.layers[0].key_stream.ring.dtype == torch.bfloat16
    assert error < 0.05 * own.abs().max()

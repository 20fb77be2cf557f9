"""Unsupported models, arguments and states are refused with one line, never computed wrongly."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import transformers
from pairwise import parametrize_pairwise
from transformers import AttentionInterface, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from kvq_cli.attention.attach import attach
from kvq_cli.cache_argument import cache_argument
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.registry import build


def refused(model, method, says: str, **options) -> None:
    before = model.config._attn_implementation
    with pytest.raises(UsageError, match=says), attach(model, method, **options):
        pass
    assert model.config._attn_implementation == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    "family, options, says",
    [
        ("gemma3", {"use_bidirectional_attention": True}, "not causal"),
        ("llama4", {"attention_chunk_size": 8}, "chunked_attention"),
    ],
)
def test_unsupported_attention_is_refused(tiny, probe, family, options, says):
    refused(tiny(family, **options), probe(), says)


@pytest.mark.parametrize(
    "name, options, says",
    [
        ("Bloom", {"n_head": 2, "n_layer": 1}, "type bloom adds ALiBi biases"),
        ("Mpt", {"d_model": 32, "n_heads": 2, "n_layers": 1}, "type mpt adds ALiBi biases"),
        ("Falcon", {"num_attention_heads": 2, "num_hidden_layers": 1, "alibi": True}, "type falcon adds ALiBi biases"),
        ("Falcon", {"num_attention_heads": 2, "num_hidden_layers": 1}, "Falcon.* not let transformers choose its att"),
    ],
)
def test_alibi_is_refused(name, options, says):
    """The last case has no ALiBi, and a model that is not downloaded."""
    size = {} if name == "Mpt" else {"hidden_size": 32}
    config = getattr(transformers, f"{name}Config")(vocab_size=20, **size, **options)
    refused(getattr(transformers, f"{name}ForCausalLM")(config).eval(), build("fp16"), says)


def test_training_mode_with_dropout_is_refused(tiny, probe):
    refused(tiny("llama", attention_dropout=0.1).train(), probe(), "eval")


@pytest.mark.parametrize("attached_first", [False, True])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # the name of transformers before 5.20
def test_gradient_checkpointing_trains_without_a_compressed_cache_only(tiny, probe, prompt, attached_first):
    model, (ids, _) = tiny("llama").requires_grad_(True), prompt(15)

    def train():
        model.train().gradient_checkpointing_enable()

    if not attached_first:
        train()
    with attach(model, probe()) as kv:
        if attached_first:
            train()
        model(ids, labels=ids).loss.backward()
        assert all(layer.mlp.up_proj.weight.grad is not None for layer in model.model.layers)
        assert all(layer.gradient_checkpointing for layer in model.model.layers)
        with pytest.raises(UsageError, match=r"gradient checkpointing in training mode.* call model.eval\(\)"):
            model(ids, past_key_values=kv.new_cache())
        with torch.no_grad():
            model.eval()(ids, past_key_values=kv.new_cache())


def test_unknown_arguments_are_refused(tiny, probe):
    model = tiny("llama")
    refused(model, probe(), "prefill 'fast'; valid: exact, compressed", prefill="fast")
    refused(model, probe(), "backend 'cuda'; valid: auto, triton, torch", backend="cuda")
    refused(model, build("temporalkv"), "calibrate")
    refused(model, build("kivi", group=5, residual=5), "head_dim")


def test_length_dependent_rotation_is_refused_before_rope(tiny, probe, prompt):
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model, (ids, _) = tiny("llama", rope_parameters=rope, max_position_embeddings=16), prompt(15)
    with attach(model, probe()) as kv:
        model(ids, past_key_values=kv.new_cache())
        cache = kv.new_cache()
        with pytest.raises(UsageError, match="RoPE changes"):
            for token in range(15 * 3):
                model(ids[:, token % 15 : token % 15 + 1], past_key_values=cache)
    with attach(model, probe(source="post_rope")) as kv:
        cache = kv.new_cache()
        for token in range(15 * 3):
            model(ids[:, token % 15 : token % 15 + 1], past_key_values=cache)


def test_invalid_prompts_are_refused(tiny, probe, prompt):
    model, (ids, mask) = tiny("llama", max_position_embeddings=32), prompt(33)
    with attach(model, probe()) as kv:
        with pytest.raises(UsageError, match="33 tokens, the model's context is 32"):
            model(ids, past_key_values=kv.new_cache())
        with pytest.raises(UsageError, match="empty"):
            model(ids[:, :0], past_key_values=kv.new_cache())
        with pytest.raises(UsageError, match="left"):
            model(ids[:, :20], attention_mask=mask[:, :20].flip(1) * (ids[:, :20] > 30), past_key_values=kv.new_cache())
        with pytest.raises(UsageError, match="2-D|shape"):
            square = torch.ones(1, 1, 20, 20, dtype=torch.bool).tril()
            model(ids[:, :20], attention_mask=square, past_key_values=kv.new_cache())


def test_decoding_beyond_the_context_is_said_once(tiny, probe, prompt, recwarn):
    model, (ids, _) = tiny("llama", max_position_embeddings=32), prompt(32)
    with attach(model, probe()) as kv:
        cache = kv.new_cache()
        model(ids, **cache_argument(cache))
        assert not recwarn.list
        for _ in range(3):
            model(ids[:, :1], **cache_argument(cache))
    assert [str(one.message) for one in recwarn.list] == [
        "decoding beyond the model's context of 32 tokens: it was not trained for longer ones"
    ]


@parametrize_pairwise({"columns": [20, 1], "value": [torch.nan, torch.inf], "which": ["k_proj", "v_proj"]})
def test_non_finite_numbers_are_refused(tiny, probe, prompt, columns, value, which):
    model, (ids, _) = tiny("llama"), prompt(20)
    with attach(model, probe()) as kv:
        cache = kv.new_cache()
        model(ids, past_key_values=cache)
        getattr(model.model.layers[1].self_attn, which).weight[5, 3] = value
        with pytest.raises(KvqError, match="layer 1: the (keys|values) contain NaN or infinity"):
            model(ids[:, :columns], past_key_values=cache)
        with pytest.raises(KvqError, match="half updated"):
            model(ids[:, :1], past_key_values=cache)


def test_cache_outside_its_attach_is_refused(tiny, probe, prompt):
    model, (ids, _) = tiny("llama"), prompt(10)
    with attach(model, probe()) as kv:
        cache = kv.new_cache()
        model(ids, past_key_values=cache)
    with pytest.raises(KvqError, match="another or closed attach"):
        model(ids[:, :1], past_key_values=cache)
    with attach(model, probe()), pytest.raises(KvqError, match="another or closed attach"):
        model(ids[:, :1], past_key_values=cache)


@pytest.mark.parametrize("around", [False, True])
def test_replaced_attention_function_is_refused(tiny, probe, prompt, around):
    """Another attention function set inside the block would see the new tokens alone. around: a block around it looks
    after its own passes only."""
    AttentionInterface.register("other", sdpa_attention_forward)
    model, (ids, _) = tiny("llama"), prompt(10)
    with attach(model, probe()) if around else nullcontext(), attach(model, probe()) as kv:
        cache = kv.new_cache()
        model(ids, past_key_values=cache)
        model.set_attn_implementation("other")
        with pytest.raises(KvqError, match="did not compute its attention with kvq"):
            model(ids[:, :1], past_key_values=cache)
        model.set_attn_implementation("kvq")
        assert model(ids, past_key_values=DynamicCache(config=model.config)).logits.isfinite().all()


def test_offloading_is_refused(tiny, probe, prompt):
    model, (ids, _) = tiny("llama"), prompt(10)
    with attach(model, probe()) as kv:
        cache = kv.new_cache()
        model(ids, past_key_values=cache)
        with pytest.raises(UsageError, match="offloaded"):
            cache.offload(0)


def test_numbers_beyond_16_bit_scales_are_refused(tiny, prompt):
    model, (ids, _) = tiny("llama"), prompt(40)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1e8)
    for method, bad in ((build("kivi", group=8), True), (build("fp16"), False)):
        with attach(model, method) as kv:
            if bad:
                with pytest.raises(KvqError, match="layer 1: the values have numbers beyond 65504"):
                    model(ids, past_key_values=kv.new_cache())
            else:
                model(ids, past_key_values=kv.new_cache())


def test_two_attention_calls_per_forward_are_refused(tiny, probe, prompt):
    """The cache would not contain the second call."""
    model, (ids, _) = tiny("diffllama"), prompt(9)
    with (
        attach(model, probe(source="post_rope")) as kv,
        pytest.raises(UsageError, match="DiffLlamaAttention calls attention twice per forward"),
    ):
        model(ids, past_key_values=kv.new_cache())


def test_keys_normalized_after_rope_need_a_post_rope_cache(tiny, probe, prompt):
    model, (ids, _) = tiny("hunyuan"), prompt(9)
    refused(model, probe(), "no rotation")
    with attach(model, probe(source="post_rope", codec="identity")) as kv:
        cache = kv.new_cache()
        actual = torch.cat([model(ids[:, i : i + 1], past_key_values=cache).logits for i in range(9)], dim=1)
    torch.testing.assert_close(actual, model(ids).logits, atol=2e-5, rtol=1e-4)

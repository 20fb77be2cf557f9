"""Capture points give the tensors that the model caches, before its rotation."""

from __future__ import annotations

import pytest
import torch
from transformers.cache_utils import DynamicCache

from kvq_cli.attention.capture_points import attention_layers, attention_modules, decoder_of
from kvq_cli.attention.rotary import TILE, Rotation, shared
from kvq_cli.errors import UsageError

FAMILIES = {
    "llama": {"attention_bias": True},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma3": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 7},
    "olmo2": {},
    "glm": {},
    "cohere": {"use_qk_norm": True},
    "smollm3": {"no_rope_layers": [1, 0, 1]},
    "gpt_neox": {"rotary_pct": 0.5},
    "persimmon": {},
    "gpt2": {},
    "opt": {"ffn_dim": 80, "word_embed_proj_dim": 64},
}


@pytest.mark.parametrize("family, options", FAMILIES.items())
def test_captured_keys_after_rotation_equal_cached_keys(tiny, prompt, family, options):
    model = tiny(family, **options)
    sites, (ids, _), seen = attention_layers(model), prompt(21), {}
    handles = []
    for site in sites:
        for name, point in (("key", site.key), ("value", site.value)):

            def keep(_module, _args, output, where=(site.index, name), point=point):
                seen[where] = point.view(output)

            handles.append(point.module.register_forward_hook(keep))
    cache = DynamicCache()
    model(ids, past_key_values=cache)
    for handle in handles:
        handle.remove()
    assert [site.index for site in sites] == [0, 1, 2]
    for site in sites:
        held = cache.layers[site.index]
        assert torch.equal(seen[site.index, "value"], held.values)
        torch.testing.assert_close(site.rotation.at(seen[site.index, "key"], 0), held.keys, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("bias", [0.0, 60.0, 400.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rotation_is_found_beside_channels_with_large_biases(tiny, dtype, bias):
    """The slowest pair of channels is hundreds of times as large as the others: its rounding hides their rotation."""
    model = tiny("qwen2", hidden_size=256, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.zero_().view(2, 64)[:, [31, 63]] = bias
    layers = attention_layers(model.to(dtype))
    assert [layer.rotation.style for layer in layers] == ["half"] * 3


@pytest.mark.parametrize(("style", "other"), [("half", "interleaved"), ("interleaved", "half")])
def test_rotation_turns_its_own_keys_alone(style, other):
    keys = torch.randn(1, 2, 9, 16, generator=torch.Generator().manual_seed(0))
    keys[..., 7] *= 100
    frequencies = 0.5 ** torch.arange(6.0)
    rotation, another = (Rotation(name, frequencies, 16) for name in (style, other))
    turned = rotation.at(keys, 0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        assert rotation.turns(keys, turned.to(dtype))
        assert not another.turns(keys, turned.to(dtype)) and not rotation.turns(keys, keys.to(dtype))
    changed = turned.clone()
    changed[..., 14] += 0.1  # a channel that is not rotated
    assert not rotation.turns(keys, changed)


def test_fields_of_an_attention_layer(tiny):
    sites = attention_layers(tiny("gemma3", **FAMILIES["gemma3"]))
    assert [site.sliding_window for site in sites] == [7, None, 7]
    assert not sites[0].rotation.same(sites[1].rotation)  # local and global layers have their own frequencies
    assert [site.rotation.style for site in attention_layers(tiny("smollm3", no_rope_layers=[1, 0, 1]))] == [
        "half",
        "none",
        "half",
    ]
    assert attention_layers(tiny("glm"))[0].rotation.style == "interleaved"
    assert attention_layers(tiny("phi3", partial_rotary_factor=0.5))[0].rotation.width == 8


def test_probing_leaves_no_hooks(tiny):
    model = tiny("llama")
    attention_layers(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert decoder_of(model) is model.model
    assert [each[:2] for each in attention_modules(model)] == [(i, f"model.layers.{i}.self_attn") for i in range(3)]


def test_unsupported_model_structures_are_refused(tiny):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    unnumbered = tiny("llama")
    del unnumbered.model.layers[0].self_attn.layer_idx
    with pytest.raises(UsageError, match="layer 0 has none of self_attn, attention, attn"):
        attention_layers(unnumbered)
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = DeepseekV3ForCausalLM(DeepseekV3Config(vocab_size=20, intermediate_size=8, **sizes, **latent))
    with pytest.raises(UsageError, match="deepseek_v3 has latent attention, which kvq does not compress"):
        attention_layers(model, points=False)
    other = tiny("llama")
    other.config.num_key_value_heads *= 2  # what its layers do not cache
    with pytest.raises(UsageError, match="caches keys of shape .* not supported"):
        attention_layers(other, points=False)


@pytest.mark.parametrize("style", ["half", "interleaved", "none"])
@pytest.mark.parametrize("start", [0, 5, 3000])
def test_rotating_the_query_back_equals_rotating_the_key_ahead(style, start):
    """q . R(s + i) k = (R(-s) q) . (R(i) k)."""
    noise = torch.Generator().manual_seed(0)
    turn = Rotation(style, 0.5 ** torch.arange(6), 16, 1.5)
    keys, query = torch.randn(2, 40, 16, generator=noise), torch.randn(2, 3, 16, generator=noise)
    expected = query @ turn.at(keys, start).transpose(1, 2)
    actual = turn.back(query, (start,))[0] @ turn.ahead(keys).transpose(1, 2)
    torch.testing.assert_close(actual, expected, atol=2e-3 if start > 100 else 1e-5, rtol=1e-4)
    assert TILE >= 40


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rotation_preserves_norms_and_depends_on_distance(style):
    noise = torch.Generator().manual_seed(0)
    turn = Rotation(style, 0.5 ** torch.arange(4), 16)
    x, y = torch.randn(1, 16, generator=noise), torch.randn(1, 16, generator=noise)
    torch.testing.assert_close(turn.at(x, 77).norm(), x.norm())
    assert torch.equal(turn.at(x, 77)[..., 8:], x[..., 8:])
    near, far = ((turn.at(x, s + 3) @ turn.at(y, s).T).item() for s in (0, 40))
    assert near == pytest.approx(far, abs=1e-4)


def test_equal_rotations_become_one_object():
    """Tables of cosines are kept for each object."""
    frequencies = 10000.0 ** -(torch.arange(8) / 8)
    first, second = (Rotation("half", frequencies.clone(), 16) for _ in range(2))
    other = Rotation("half", frequencies / 2, 16)
    result = shared([first, other, second])
    assert result[0] is first and result[1] is other and result[2] is first

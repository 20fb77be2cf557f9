"""The hooks receive exactly the numbers that the model computes."""

import pytest
import torch
import transformers

from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.papers.studies.activation_hooks import query_hooks, watch_inputs

SIZES = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}  # Qwen3 has heads of 128, the others of 16
IDS = torch.arange(3, 40)


def model_of(family: str):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **HEADS)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)


@pytest.fixture(params=["Llama", "Qwen3", "Phi3"])
def model(request):
    return model_of(request.param)


def queries_seen(model, pre_rope: bool) -> list:
    """Per layer (keys, values, queries)."""
    found = {}
    with query_hooks(model, pre_rope) as watch:
        watch(IDS, lambda layer, prompt: found.setdefault(layer, (prompt.keys, prompt.values, prompt.queries)))
    return [found[layer] for layer in range(len(found))]


def test_queries_and_keys_give_the_models_attention_weights(model):
    model.set_attn_implementation("eager")
    weights = model(IDS[None], output_attentions=True).attentions
    seen = queries_seen(model, pre_rope=False)
    assert len(seen) == len(weights) == 3
    hidden = torch.ones(len(IDS), len(IDS)).triu(1).bool()
    for (keys, _, queries), expected in zip(seen, weights, strict=True):
        scores = queries @ keys.repeat_interleave(2, dim=1).mT * keys.shape[-1] ** -0.5
        torch.testing.assert_close(scores.masked_fill(hidden, -torch.inf).softmax(-1), expected)


def test_before_rope_differs_by_the_rotation_alone(model):
    sites = attention_layers(model)
    for site, before, after in zip(sites, queries_seen(model, True), queries_seen(model, False), strict=True):
        for x, turned in zip(before, after, strict=True):
            expected = x if torch.equal(x, turned) else site.rotation.at(x, 0)  # values are not rotated
            torch.testing.assert_close(expected, turned, atol=1e-5, rtol=1e-5)
        assert not torch.equal(before[0], after[0]) and not torch.equal(before[2], after[2])


def test_inputs_project_to_the_keys_and_values_given_with_them(model):
    seen = {}
    watch_inputs(model, attention_layers(model), IDS, lambda layer, kind, x: seen.setdefault((layer, kind), x))
    assert len(seen) == 9 and all(x.shape[0] == len(IDS) for x in seen.values())
    for layer, site in enumerate(attention_layers(model)):
        projection = getattr(site.module, "v_proj", None) or site.module.qkv_proj
        made = projection(seen[layer, "x"])
        torch.testing.assert_close(made[:, -seen[layer, "v"].shape[1] :], seen[layer, "v"])
        keys, *_ = queries_seen(model, True)[layer]
        torch.testing.assert_close(keys[0].transpose(0, 1).flatten(1), seen[layer, "k"])


def test_the_model_is_unchanged_afterwards(model):
    before = model(IDS[None]).logits
    implementation = model.config._attn_implementation
    queries_seen(model, True)
    watch_inputs(model, attention_layers(model), IDS, lambda *_: None)
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(IDS[None]).logits, before)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

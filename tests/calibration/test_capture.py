"""Captured keys, values and gradients against finite differences and against the model's own cache."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.calibration import estimate
from kvq_cli.calibration.capture import blocked_attention_on_cpu, capture, gradient_checkpointing
from kvq_cli.errors import KvqError
from kvq_cli.upcast import upcast_forward_passes

FAMILIES = {
    "Llama": {"head_dim": 8},
    "Qwen2": {},  # biases
    "Qwen3": {"head_dim": 8},  # k_norm
    "Phi3": {"pad_token_id": 0},  # qkv_proj
    "Cohere": {},  # interleaved rotation, scaled logits
}
#: Families whose cached numbers are not what a projection gives, or whose layers drop activations themselves.
OTHERS = {
    "Olmo": {"clip_qkv": 0.1},  # in place
    "OPT": {"num_key_value_heads": 4, "ffn_dim": 40, "word_embed_proj_dim": 32, "dropout": 0.5},
}


def model_of(family):
    """A random float64 model and its attention layers."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = getattr(transformers, f"{family}Config")(**sizes | (FAMILIES | OTHERS)[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=1.5 * parameter.shape[1] ** -0.5)
    layers = attention_layers(model)
    return model.double(), layers


def captured(model, layers, gradients=True, near=0):
    found = {}
    capture(model, layers, TOKENS, lambda *a: found.__setitem__(a[:3], a[3].clone()), gradients=gradients, near=near)
    return found


def loss(model):
    logits = model(input_ids=TOKENS[None], use_cache=False).logits[0]
    return -logits.log_softmax(-1)[:-1].gather(1, TOKENS[1:, None]).sum()


TOKENS = torch.randint(0, 50, (13,), generator=torch.Generator().manual_seed(1))


def modify(point, change):
    """A hook that applies `change` to the keys or values at a capture point."""

    def changed(_module, _args, output):
        output = output.clone()
        change(point.view(output))
        return output

    return point.module.register_forward_hook(changed)


def points_of(layers):
    return [((layer.index, kind), point) for layer in layers for kind, point in (("k", layer.key), ("v", layer.value))]


def reading_later(layers, near, added):
    """An attention function, computed plainly, in which predictions from `near` tokens behind a token on read its key
    before RoPE and its value with the numbers of `added`, by module."""
    rotations = {layer.module: layer.rotation for layer in layers}

    def attention(module, query, key, value, attention_mask, scaling=None, **options):
        groups, scale = query.shape[1] // key.shape[1], scaling or query.shape[-1] ** -0.5
        more_key, more_value = added[module]
        packed_key = key + rotations[module].at(more_key.float(), 0).double()
        keys, packed_keys, values, packed_values = (
            x.repeat_interleave(groups, 1) for x in (key, packed_key, value, value + more_value)
        )
        distance = torch.arange(len(TOKENS))[:, None] - torch.arange(len(TOKENS))
        far = distance >= near
        scores = torch.where(far, query @ packed_keys.mT, query @ keys.mT) * scale
        if (cap := options.get("softcap")) is not None:
            scores = cap * (scores / cap).tanh()
        window = options.get("sliding_window") or len(TOKENS)
        weights = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf).softmax(-1)
        out = (weights * far) @ packed_values + (weights * ~far) @ values
        return out.transpose(1, 2), None

    return attention


PACKED = {
    "Llama": {"head_dim": 8},
    "Cohere": {},
    "Gemma2": {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    "Gemma3Text": {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
}


@pytest.mark.parametrize("family", PACKED)
@pytest.mark.parametrize("near", [1, 4])
def test_gradients_of_packed_tokens_are_those_of_later_reads(family, near):
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0}
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes | PACKED[family])
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=1.5 * parameter.shape[-1] ** -0.5)
    layers = attention_layers(model)
    model.double()
    with blocked_attention_on_cpu(model, layers, always=True), gradient_checkpointing(model, 1):
        found = captured(model, layers, near=near)
    zeros = torch.zeros(1, 2, len(TOKENS), 8, dtype=torch.float64)
    added = {layer.module: [zeros.clone().requires_grad_() for _ in "kv"] for layer in layers}
    transformers.AttentionInterface.register("reading_later", reading_later(layers, near, added))
    model.set_attn_implementation("reading_later")
    loss(model).backward()
    for layer in layers:
        for kind, more in zip("kv", added[layer.module], strict=True):
            gradient, expected = found[layer.index, kind, "g"], more.grad[0].transpose(0, 1)
            assert expected.abs().max() > 1e-3 and not gradient[len(TOKENS) - near :].any()
            assert torch.allclose(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_finite_differences_of_the_loss(family):
    """One number of one token is changed. The models' norms compute in float32."""
    model, layers = model_of(family)
    found = captured(model, layers)
    noise = torch.Generator().manual_seed(2)
    for where, point in points_of(layers):
        for _ in range(4):
            token, head, channel = (int(torch.randint(n, (1,), generator=noise)) for n in (12, 2, 8))
            losses = []
            for step in (4e-3, -4e-3, 8e-3, -8e-3):
                handle = modify(point, lambda x, step=step, at=(0, head, token, channel): x[at].add_(step))
                losses.append(loss(model).item())
                handle.remove()
            slope = (8 * (losses[0] - losses[1]) - (losses[2] - losses[3])) / (12 * 4e-3)  # to the fourth order
            assert found[*where, "g"][token, head, channel].item() == pytest.approx(slope, rel=2e-3, abs=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_those_to_tensors_added_to_keys_and_values(family):
    model, layers = model_of(family)
    found = captured(model, layers)
    added = {where: torch.zeros(1, 2, 13, 8, dtype=torch.float64, requires_grad=True) for where, _ in points_of(layers)}
    handles = [modify(point, lambda x, more=added[where]: x.add_(more)) for where, point in points_of(layers)]
    loss(model).backward()
    for handle in handles:
        handle.remove()
    for where, more in added.items():
        expected = more.grad[0].transpose(0, 1)
        assert expected.abs().max() > 1e-3
        assert torch.allclose(found[*where, "g"], expected, rtol=1e-4, atol=1e-6)


class AddingCache(transformers.DynamicCache):
    """Adds zeros that require gradients to the keys (after RoPE) and values of each layer."""

    def __init__(self):
        super().__init__()
        self.added = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        zeros = [torch.zeros_like(x).requires_grad_() for x in (key_states, value_states)]
        self.added |= {(layer_idx, kind): x for kind, x in zip("kv", zeros, strict=True)}
        return super().update(key_states + zeros[0], value_states + zeros[1], layer_idx, *args, **kwargs)


def test_numbers_that_are_clamped_in_place_are_captured_as_they_are_cached():
    """OLMo clamps the outputs of its projections."""
    model, layers = model_of("Olmo")
    found, cache = captured(model, layers), AddingCache()
    plain = captured(model, layers, gradients=False)
    assert all(torch.equal(found[key], plain[key]) for key in plain)
    with torch.enable_grad():
        logits = model(input_ids=TOKENS[None], past_key_values=cache).logits[0]
        (-logits.log_softmax(-1)[:-1].gather(1, TOKENS[1:, None]).sum()).backward()
    for (layer, kind), added in cache.added.items():
        numbers, gradient = found[layer, kind, "x"], found[layer, kind, "g"]
        assert ((numbers.abs() == 0.1).double().mean() > 0.5) and numbers.abs().max() == 0.1
        expected = added.grad[0].transpose(0, 1)
        assert (expected[:-1].abs().amax(dim=(1, 2)) > 0).all()
        if kind == "k":  # position 0 is not rotated, and a rotation keeps norms
            torch.testing.assert_close(gradient[0], expected[0], rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(gradient.norm(dim=-1), expected.norm(dim=-1), rtol=1e-4, atol=1e-6)
        else:
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_activations_are_the_cached_keys_and_values_before_rope(family):
    model, layers = model_of(family)
    cache = transformers.DynamicCache()
    model(input_ids=TOKENS[None], past_key_values=cache)
    found = captured(model, layers, gradients=False)
    assert not any(quantity == "g" for _, _, quantity in found)
    for layer in range(3):
        assert torch.allclose(found[layer, "v", "x"], cache.layers[layer].values[0].transpose(0, 1))
        keys, before = cache.layers[layer].keys[0].transpose(0, 1), found[layer, "k", "x"]
        assert torch.allclose(keys[0], before[0])  # position 0 is not rotated
        assert torch.allclose(keys.norm(dim=-1), before.norm(dim=-1))
        assert torch.allclose(keys[1:], before[1:]) == (layers[layer].rotation.style == "none")


@pytest.mark.parametrize("family", ["Qwen3", *OTHERS])
def test_activations_do_not_depend_on_gradients_and_checkpointing(family):
    """OPT's layers drop activations in training mode, which transformers' checkpointing needs."""
    model, layers = model_of(family)
    plain, forward = captured(model, layers), captured(model, layers, gradients=False)
    with gradient_checkpointing(model, 3):
        saved = captured(model, layers)
    assert plain.keys() == saved.keys() and len(plain) == 3 * 2 * 2
    assert all(torch.equal(plain[key], saved[key]) for key in plain)
    assert all(torch.equal(plain[key], forward[key]) for key in forward)


def test_checkpointed_layers_of_16_bits_are_recomputed_with_the_same_products(monkeypatch):
    """Where this CPU multiplies 16-bit matrices in float32, in the backward pass, too."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64"})
    model, layers = model_of("Llama")
    model.bfloat16()
    upcast_forward_passes(model)
    plain = captured(model, layers)
    with gradient_checkpointing(model, 3):
        saved = captured(model, layers)
    assert all(torch.equal(plain[key], saved[key]) for key in plain)


def test_the_last_product_of_a_layer_of_16_bits_is_not_recomputed(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64"})
    (model, layers), runs = model_of("Llama"), []
    model.bfloat16()
    for module in ("up_proj", "down_proj"):
        getattr(model.model.layers[1].mlp, module).register_forward_pre_hook(lambda *_, x=module: runs.append(x))
    with gradient_checkpointing(model, 3):
        captured(model, layers)
    assert runs == ["up_proj", "down_proj", "up_proj"]


def test_checkpointing_recomputes_layers_in_the_backward_pass():
    (model, layers), runs = model_of("Llama"), []
    model.model.layers[1].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    captured(model, layers)
    assert len(runs) == 1
    with gradient_checkpointing(model, 3):
        captured(model, layers)
    assert len(runs) == 1 + 2


def test_layers_are_as_before_after_an_exception_in_checkpointing():
    model, layers = model_of("OPT")
    before = [dict(vars(module)) for module in model.modules()]
    with pytest.raises(KeyboardInterrupt), gradient_checkpointing(model, 3):
        assert not any(module.training for module in model.modules())
        raise KeyboardInterrupt
    assert [dict(vars(module)) for module in model.modules()] == before


def test_hooks_and_gradients_are_removed_from_the_model():
    model, layers = model_of("Llama")
    captured(model, layers)
    assert all(not module._forward_hooks for module in model.modules())
    assert all(not p.requires_grad and p.grad is None for p in model.parameters())
    with pytest.raises(IndexError):
        capture(model, layers, TOKENS, lambda *_: 1 / torch.zeros(0)[5], gradients=True)
    assert all(not module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_numbers_are_refused_naming_the_layer(bad):
    model, layers = model_of("Llama")
    handle = layers[1].value.module.register_forward_hook(lambda m, a, out: out.index_fill(1, torch.tensor([5]), bad))
    with pytest.raises(KvqError, match=r"the values of layer 1 are not all finite"):
        capture(model, layers, TOKENS, lambda *_: None, gradients=False)
    handle.remove()
    # An activation may be finite where its gradient is not.
    model.lm_head.register_full_backward_pre_hook(lambda module, gradient: (gradient[0] * bad,))
    with pytest.raises(KvqError, match=r"the gradients of the (keys|values) of layer 2 are not all finite"):
        capture(model, layers, TOKENS, lambda *_: None, gradients=True)


def test_logits_of_large_vocabularies_do_not_make_layers_run_twice(monkeypatch):
    """Recomputing layers makes logits no smaller: those of 128 tokens of Gemma take 384 MiB, the limit of activations
    on a CPU."""
    config = transformers.Gemma3TextConfig(
        vocab_size=262144, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(config)
    loaded = SimpleNamespace(model=model, shape=SimpleNamespace(layers=4, dtype="float32"))
    monkeypatch.setattr(type(model), "device", torch.device("cpu"))
    monkeypatch.setattr(estimate, "free_bytes", lambda device: 8 << 30)
    assert estimate.checkpointed_layers(loaded, 1024) == 0
    monkeypatch.setattr(estimate, "free_bytes", lambda device: 2 * 128 * 262144 * 12)  # room for logits alone
    assert estimate.checkpointed_layers(loaded, 1024) == 4

"""Attention over cached layer inputs: kernel against PyTorch; in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch
from kvq_kernels.tuning import trying
from tiers import slow

from kvq_cli.attention.attach import attach
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.models import load_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
COLUMNS, STEPS = 37, 2
SMALL = {"group": 8, "sinks": 3, "recent": 2}


@pytest.fixture(autouse=True)
def small_tiles():
    """The interpreter computes whole tiles, however few tokens there are."""
    with trying("rematerialize", {"tokens": 16, "words": 16, "span": 32}):
        yield


def logits(model, artifact, prompt, backend: str) -> tuple[torch.Tensor, str]:
    """(logits, backend) of `STEPS` single tokens after a prompt of two rows, the first padded."""
    ids, mask = (x.to(DEVICE) for x in prompt(COLUMNS + STEPS, pads=(13, 0)))
    positions, outs = (mask.cumsum(1) - 1).clamp(min=0), []
    with attach(model, artifact, backend=backend) as kv:
        cache = kv.new_cache()
        for begin, end in ((0, COLUMNS), *((i, i + 1) for i in range(COLUMNS, COLUMNS + STEPS))):
            given = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
            outs.append(model(ids[:, begin:end], past_key_values=cache, **given).logits[:, -1:])
        assert cache.report().compressed > 0
        return torch.cat(outs[1:], dim=1).float(), kv.report().backend


def same(model, artifact, prompt, tolerance: float = 2e-4) -> None:
    expected, _ = logits(model, artifact, prompt, "torch")
    actual, by = logits(model, artifact, prompt, "triton")
    assert by == "triton" if DEVICE.type == "cuda" else by == "triton, interpreted"
    assert (actual - expected).abs().max() < tolerance * expected.abs().max()


@pytest.fixture(scope="module")
def one_layer(tiny):
    """`one_layer("qwen3")`: 4 query heads and 2 kv heads, with biases where the family has them."""

    def make(family="llama", **options):
        model = tiny(family, num_hidden_layers=1, **options)
        for name, parameter in model.named_parameters():
            if name.endswith("proj.bias"):
                parameter.normal_()
            if name.endswith("k_norm.weight"):
                parameter.uniform_(0.5, 1.5)
        return model.to(DEVICE)

    return make


@pytest.mark.parametrize("kv_heads", [4, *slow(2, 1)])
@pytest.mark.parametrize("options", [{"bits": 2}, *slow({"bits": 16}, {"bits": 3, "first_channel": True})])
def test_kv_heads_and_storage_formats(one_layer, prompt, factored, kv_heads, options):
    """With 4 kv heads the layer input itself is cached."""
    model = one_layer(num_key_value_heads=kv_heads)
    same(model, factored(model, build("xquant", **options, **SMALL)), prompt)


FAMILIES = {
    "qwen2": {},  # biases
    "qwen3": {},  # an RMS norm of each head
    "cohere": {"use_qk_norm": True},  # a layer norm of each head, with weights of its own; pairs beside each other
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma3": {"sliding_window": 7, "layer_types": ["sliding_attention"]},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_model_families(one_layer, prompt, factored, family):
    model = one_layer(family, **FAMILIES[family])
    same(model, factored(model, build("xquant", bits=4, **SMALL)), prompt)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_models(one_layer, prompt, factored, dtype):
    model = one_layer("qwen3").to(dtype)
    same(model, factored(model, build("xquant", bits=4, **SMALL)), prompt, 8 * torch.finfo(dtype).eps)


def test_decoding_from_the_first_token(one_layer, factored):
    """Nothing is packed, and some rows are still empty."""
    model, actual = one_layer(), []
    artifact = factored(model, build("xquant", group=4, sinks=1))
    ids = torch.arange(3, 15, device=DEVICE).view(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6], device=DEVICE)
    for backend in ("torch", "triton"):
        with attach(model, artifact, prefill="compressed", backend=backend) as kv:
            cache, outs = kv.new_cache(), []
            for i in range(6):
                outs.append(model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache).logits)
        actual.append(torch.cat(outs, dim=1)[mask.bool()])
    torch.testing.assert_close(actual[1], actual[0], atol=1e-3, rtol=1e-3)


def test_keys_normalized_over_all_heads_use_torch(one_layer, factored):
    model = one_layer("olmo2")
    artifact = factored(model, build("xquant", **SMALL))
    says = "all layers: keys are normalized over all heads at once"
    with pytest.raises(UsageError, match=says), attach(model, artifact, backend="triton"):
        pass


def test_cross_layer_sums_use_torch(tiny, factored):
    model = tiny("llama").to(DEVICE)
    artifact = factored(model, build("xquant-cl", base_layers=2, **SMALL))
    says = "layers 1, 2: packed layer inputs are sums over layers"
    with pytest.raises(UsageError, match=says), attach(model, artifact, backend="triton"):
        pass


@pytest.mark.slow
def test_built_in_model_generates_the_same_tokens(factored):
    loaded, said = load_model("reference", device=DEVICE.type, dtype="float32"), []
    artifact = factored(loaded.model, build("xquant", bits=4, group=8, sinks=1))
    ids = loaded.tokenizer(" The history of the town begins in the year", return_tensors="pt")["input_ids"].to(DEVICE)
    for backend in ("torch", "triton"):
        with attach(loaded.model, artifact, backend=backend) as kv:
            cache = kv.new_cache()
            out = loaded.model.generate(ids, past_key_values=cache, max_new_tokens=4, min_new_tokens=4, do_sample=False)
            assert kv.report(cache).compressed > 0
            said.append(out[0].tolist())
    assert said[0] == said[1]

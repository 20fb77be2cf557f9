"""Attention over codes of a transform's components: kernel against PyTorch; in Triton's interpreter where there is no
GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from codec_methods import DEVICE, CodecMethod, codebook, transform, transforms
from test_triton_backend import YARN, same
from tiers import slow, slow_cases

from kvq_cli.artifact import load_artifact
from kvq_cli.attention.attach import attach
from kvq_cli.attention.backend import choose_backend
from kvq_cli.methods.window import Window
from kvq_cli.models import load_model


def method(keys=None, values=None, window=None) -> CodecMethod:
    """Keys and values of a transform per head, unless others are given."""
    return CodecMethod(keys or transform(False), values or transform(True), window=window or Window(3, 5, 16))


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ({}, {"joined": True, "widths": (5, 4, 2, 2, 1)}),
        *slow_cases(({"joined": True}, {}), ({"gain": False}, {"widths": (7, 3)}), ({}, {"gain": False})),
    ],
)
def test_transforms_per_head_and_of_all_heads(one_layer, prompt, keys, values):
    same(one_layer(), method(transform(False, **keys), transform(True, **values)), prompt)


KEYS = [((3, 2, 2), (2, 0)), ((4, 2, 1, 1), (1,))]
VALUES = [((2, 2, 1), (2, 0)), ((3, 3), (1,))]


@pytest.mark.parametrize(
    ("keys", "values", "dtype"),
    [
        (transforms(False, *KEYS), transforms(True, *VALUES), torch.float16),
        *slow_cases(
            (transforms(False, *KEYS), transforms(True, *VALUES), torch.float32),
            (transforms(False, *KEYS), transforms(True, ((2, 1), (1, 2)), ((4, 4), (0,))), torch.float16),
            (transforms(False, *KEYS), transform(True), torch.bfloat16),
            (transform(False), transforms(True, *VALUES), torch.float16),
        ),
    ],
)
def test_heads_with_different_widths(one_layer, prompt, keys, values, dtype):
    """In float16 the kernel reads the codes, in float32 they are unpacked. Keys and values may have other lists of
    heads."""
    model = one_layer((6, 3), hidden_size=96).to(dtype)
    same(model, method(keys, values), prompt, max(2e-4, 8 * torch.finfo(dtype).eps))


@pytest.mark.parametrize("window", [Window(0, 0, 16), *slow(Window(5, 20, 16), Window(30, 0, 16))])
def test_windows(one_layer, prompt, window):
    same(one_layer((2, 2)), method(window=window), prompt)


def test_scaled_rope(one_layer, prompt):
    same(one_layer((2, 1), rope_parameters=YARN), method(), prompt)


@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.bfloat16)])
def test_sixteen_bit_models(one_layer, prompt, dtype):
    same(one_layer().to(dtype), method(), prompt, 8 * torch.finfo(dtype).eps)


@pytest.mark.slow
def test_sliding_windows(tiny, prompt):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    same(tiny("gemma3", sliding_window=17, layer_types=kinds).to(DEVICE), method(), prompt)


def test_decoding_from_the_first_token(one_layer):
    """Nothing is packed, and some rows are still empty."""
    model, actual = one_layer(), []
    ids = torch.arange(3, 15, device=DEVICE).view(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6], device=DEVICE)
    for backend in ("torch", "triton"):
        with attach(model, method(), prefill="compressed", backend=backend) as kv:
            cache, outs = kv.new_cache(), []
            for i in range(6):
                outs.append(model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache).logits)
        actual.append(torch.cat(outs, dim=1)[mask.bool()])
    torch.testing.assert_close(actual[1], actual[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        (transform(False), transform(True)),
        (transforms(False, ((2,), (1,)), ((3, 2), (0,))), transforms(True, ((2,), (0, 1)))),
    ],
)
def test_layers_of_other_kinds_use_their_own_kernels(tiny, keys, values):
    """Layer 0 keeps components, layer 1 codes of vectors, layer 2 neither: PyTorch. Likewise with lists of heads."""

    class Mixed(CodecMethod):
        def plan(self, layer, shape, tensors):
            pairs = [(keys, values), (codebook(), codebook()), (keys, codebook())]
            return method(*pairs[layer]).plan(layer, shape, tensors)

    model = tiny("llama", head_dim=32).to(DEVICE)
    with attach(model, Mixed(codebook(), codebook()), backend="auto") as kv:
        layers = list(zip(kv.layers, kv.plans, strict=True))
    chosen = choose_backend("auto", torch.device("cuda"), layers)
    assert [chosen.by_kernels(layer) for layer in range(3)] == [True, True, False]
    assert type(chosen.of(0)).__name__ == "TransformBackend" and type(chosen.of(1)).__name__ == "TritonBackend"
    assert "layer 2: of the keys codes stand for components of a transform" in chosen.summary


@pytest.mark.slow
@pytest.mark.parametrize("join_keys", [False, True])
def test_built_in_model_generates_the_same_tokens(join_keys, tmp_path, kvq):
    out = tmp_path / "klt"
    options = {"recent": 0, "join_keys": "on" if join_keys else "off"}
    chosen = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
    result = kvq("calibrate", "--method", "klt", "--samples", 4, "--seqlen", 256, "--out", out, *chosen)
    assert result.exit_code == 0, result.output
    loaded, said = load_model("reference", device=DEVICE.type, dtype="float32"), []
    text = " The history of the town begins in the year in which the first of its houses were built beside the river"
    ids = loaded.tokenizer(2 * text, return_tensors="pt")["input_ids"].to(DEVICE)
    for backend in ("torch", "triton"):
        with attach(loaded.model, load_artifact(Path(out)), backend=backend) as kv:
            cache = kv.new_cache(ids.shape[1] + 2)
            out_ids = loaded.model.generate(
                ids, past_key_values=cache, max_new_tokens=2, min_new_tokens=2, do_sample=False
            )
            assert kv.report(cache).compressed > 0
            said.append(out_ids[0].tolist())
    assert said[0] == said[1]

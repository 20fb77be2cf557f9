"""Attention: kernels against PyTorch, in Triton's interpreter where there is no GPU; choice of the backend."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from codec_methods import (
    DEVICE,
    WINDOWS,
    CodecMethod,
    codebook,
    outliers,
    per_head,
    per_head_rotated,
    per_token,
    rotated,
    rotated_below_outliers,
    transform,
    uniform_codes,
)
from tiers import slow, slow_cases

from kvq_cli.artifact import load_artifact
from kvq_cli.attention import triton_backend
from kvq_cli.attention.attach import attach
from kvq_cli.attention.backend import choose_backend
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.methods.window import Window
from kvq_cli.models import load_model

COLUMNS, STEPS = 53, 2
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}


def logits(model, method, prompt, backend: str) -> tuple[torch.Tensor, object]:
    """(logits, backend) of `STEPS` single tokens after a prompt of two rows, the first padded."""
    ids, mask = (x.to(DEVICE) for x in prompt(COLUMNS + STEPS, pads=(13, 0)))
    positions, outs = (mask.cumsum(1) - 1).clamp(min=0), []
    with attach(model, method, backend=backend) as kv:
        cache = kv.new_cache()
        for begin, end in ((0, COLUMNS), *((i, i + 1) for i in range(COLUMNS, COLUMNS + STEPS))):
            given = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
            outs.append(model(ids[:, begin:end], past_key_values=cache, **given).logits[:, -1:])
        assert cache.report().compressed > 0
        return torch.cat(outs[1:], dim=1).float(), kv.report()


def same(model, method, prompt, tolerance: float = 2e-4) -> None:
    """Float32 models: the kernels' float32 products and PyTorch's differ in the order of their sums."""
    expected, report = logits(model, method, prompt, "torch")
    assert report.backend == report.to_dict()["backend"] == "torch"
    actual, report = logits(model, method, prompt, "triton")
    assert report.backend.startswith("triton") and report.backend in str(report)
    assert (actual - expected).abs().max() < tolerance * expected.abs().max()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fp16", {}),
        ("kivi", {"bits": 2, "group": 16, "residual": 32}),
        *slow_cases(
            ("kivi", {"bits": 4, "group": 16, **WINDOWS}),
            ("kivi", {"bits": 2, "group": 16, "buffer": 16, **WINDOWS}),
            ("squat", {"bits": 2, "group": 16, **WINDOWS}),
            ("squat", {"bits": 2, "group": 16, "buffer": 16, **WINDOWS}),
            ("innerq", {"bits": 2, **WINDOWS}),
            ("innerq", {"bits": 2, "buffer": 32, **WINDOWS}),
            ("innerq", {"bits": 4, "group": 16, "mode": "symmetric", **WINDOWS}),
            ("innerq", {"bits": 3, "group": 16, "mode": "symmetric", "sign": "inside", **WINDOWS}),
            ("innerq", {"bits": 2, "group": 16, "mode": "asymmetric", "norm": False, **WINDOWS}),
        ),
    ],
)
def test_uniform_methods(one_layer, prompt, name, options):
    same(one_layer((2, 1)), build(name, **options), prompt)


@pytest.mark.parametrize(
    ("keys", "values", "options"),
    [
        (codebook(), codebook(normal=False), {}),
        *slow_cases(
            (codebook((1, 4)), codebook((1, 4), normal=False), {}),
            (codebook((2, 1), share=2), codebook((2, 2)), {"source": "post_rope"}),
            (codebook((1, 1), 16, 32), per_token(0.0), {"window": Window(1, 0, 1)}),
            (outliers, per_token(0.05), {"window": Window(1, 3, 32)}),
            (per_head, per_head, {}),
        ),
    ],
    ids=["temporal", "channel", "post_rope", "scalars", "outliers", "per_head"],
)
def test_codebook_storage_formats(one_layer, prompt, keys, values, options):
    same(one_layer(), CodecMethod(keys, values, **options), prompt)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [(2, 2), (8, 1)])
def test_query_heads_per_kv_head(one_layer, prompt, heads):
    same(one_layer(heads, hidden_size=32 * heads[0]), build("kivi", group=16, **WINDOWS), prompt)


@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.float32, torch.bfloat16)])
def test_rotated_channels(one_layer, prompt, dtype):
    method = build("kivi", bits=4, group=16, rotation="hadamard", **WINDOWS)
    same(one_layer((2, 1)).to(dtype), method, prompt, max(1e-3, 8 * torch.finfo(dtype).eps))


@pytest.mark.parametrize("options", [{}, *slow({"bits": 2, "correct_norm": False, "values": "lloyd_max"})])
def test_norms_and_directions(one_layer, prompt, options):
    same(one_layer((2, 1)), build("turboquant", **WINDOWS, **options), prompt)


@pytest.mark.parametrize("method", ["kivi:rotation=hadamard", "turboquant"])
def test_a_matrix_made_in_inference_mode_serves_gradients(one_layer, method):
    """The model asks for gradients of what is computed after it, not of attention by kernels."""
    model, (name, *options) = one_layer((2, 1)), method.split(":")
    ids = torch.arange(3, 24, device=DEVICE)[None]
    with attach(model, build(name, **dict(x.split("=") for x in options), **WINDOWS), backend="triton") as kv:
        cache = kv.new_cache()
        with torch.inference_mode():
            model(ids[:, :-2], past_key_values=cache)
            model(ids[:, -2:-1], past_key_values=cache)
        assert model(ids[:, -1:], past_key_values=cache).logits.isfinite().all()


def test_large_values_of_bfloat16(one_layer):
    """Beyond float16's range, in tokens that are not packed."""
    model = one_layer((2, 1)).bfloat16()
    next(p for name, p in model.named_parameters() if "v_proj" in name).data.mul_(1e6)
    ids = torch.arange(3, 7, device=DEVICE)[None]
    with attach(model, build("kivi", rotation="hadamard", **WINDOWS), backend="triton") as kv:
        cache = kv.new_cache()
        model(ids[:, :-1], past_key_values=cache)
        assert model(ids[:, -1:], past_key_values=cache).logits.isfinite().all()


def test_matrix_of_each_head(one_layer, prompt):
    """Keys alone are rotated, by other matrices for both kv heads; values alone."""
    same(one_layer((4, 2)), CodecMethod(rotated, uniform_codes, source="post_rope"), prompt)
    same(one_layer((4, 2)), CodecMethod(uniform_codes, rotated, source="post_rope"), prompt)


def test_interleaved_and_scaled_rope(one_layer, prompt):
    same(one_layer((2, 1), rope_parameters=YARN), build("kivi", bits=3, group=16, pre_rope=True, **WINDOWS), prompt)


def test_positions_that_count_pads(one_layer, prompt):
    model, (ids, mask) = one_layer((2, 1)), prompt(COLUMNS + 1, pads=(13, 0))
    ids, mask, actual = ids.to(DEVICE), mask.to(DEVICE), []
    for backend in ("torch", "triton"):
        with attach(model, build("kivi", group=16, pre_rope=True, **WINDOWS), backend=backend) as kv:
            cache = kv.new_cache()
            model(ids[:, :-1], attention_mask=mask[:, :-1], past_key_values=cache)
            actual.append(model(ids[:, -1:], attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(actual[1], actual[0], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.bfloat16)])
def test_sixteen_bit_models(one_layer, prompt, dtype):
    same(one_layer((2, 1)).to(dtype), build("kivi", bits=4, group=16, **WINDOWS), prompt, 8 * torch.finfo(dtype).eps)


def test_decoding_from_the_first_token(one_layer):
    """Nothing is packed, and some rows are still empty."""
    model, actual = one_layer(), []
    method = build("innerq", group=16, mode="symmetric", sign="inside", sinks=2, recent=1)
    ids = torch.arange(3, 15, device=DEVICE).view(2, 6)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]], device=DEVICE)
    for backend in ("torch", "triton"):
        with attach(model, method, prefill="compressed", backend=backend) as kv:
            cache, outs = kv.new_cache(), []
            for i in range(6):
                outs.append(model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache).logits)
        actual.append(torch.cat(outs, dim=1)[mask.bool()])
    torch.testing.assert_close(actual[1], actual[0], atol=1e-3, rtol=1e-3)


ARTIFACTS = Path(__file__).parents[2] / "artifacts" / "reference"


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        build("kivi", bits=2, group=4, sinks=1, recent=2),
        build("innerq", bits=2, sinks=1, recent=2),
        build("squat", bits=2, group=4, sinks=1, recent=2),
        "temporalkv-2bit",
        "channelkv-2bit",
        "kvquant-2bit",
    ],
    ids=lambda method: method if isinstance(method, str) else method.name,
)
def test_built_in_model_generates_the_same_tokens(method):
    loaded, said = load_model("reference", device=DEVICE.type, dtype="float32"), []
    method = load_artifact(ARTIFACTS / method) if isinstance(method, str) else method
    text = " The history of the town begins in the year in which the first of its houses were built beside the river"
    ids = loaded.tokenizer(2 * text, return_tensors="pt")["input_ids"].to(DEVICE)
    for backend in ("torch", "triton"):
        with attach(loaded.model, method, backend=backend) as kv:
            cache = kv.new_cache(ids.shape[1] + 2)
            out = loaded.model.generate(ids, past_key_values=cache, max_new_tokens=2, min_new_tokens=2, do_sample=False)
            assert kv.report(cache).compressed > 0
            said.append(out[0].tolist())
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (build("gear"), "a low-rank approximation"),
        (build("zipcache"), "different numbers of bits"),
        (build("innerq", group=16), "use group=32"),
        (build("kivi", rotation="hadamard", pre_rope=True), "rotated before RoPE"),
        (CodecMethod(per_head_rotated, uniform_codes), "channels are rotated"),
        (CodecMethod(rotated_below_outliers, uniform_codes, window=Window(3, 5, 32)), "channels are rotated"),
        (CodecMethod(transform(False), codebook(), window=Window(3, 5, 16)), "components of a transform"),
        (CodecMethod(codebook((1, 8), 65536, 8), codebook((1, 8), 65536, 8)), "codes have 16 bits"),
    ],
)
def test_unsupported_storage_is_refused_or_uses_torch(one_layer, method, says):
    model = one_layer()
    with (
        pytest.raises(UsageError, match=f"--backend triton: all layers: .*{says}"),
        attach(model, method, backend="triton"),
    ):
        pass
    with attach(model, method) as kv:
        layers = list(zip(kv.layers, kv.plans, strict=True))
    chosen = choose_backend("auto", torch.device("cuda"), layers)
    assert chosen.summary.startswith("torch (all layers: ") and says in chosen.summary


@pytest.mark.parametrize(("head_dim", "says"), [(8, "head_dim=8 is below 16"), (16, None)])
def test_narrow_heads_are_refused(tiny, head_dim, says):
    model = tiny("llama", head_dim=head_dim)
    with attach(model, build("kivi", group=8, **WINDOWS)) as kv:
        assert triton_backend.unsupported(kv.plans[0], kv.layers[0].rotation) == says


@pytest.mark.parametrize(
    ("family", "says"), [("gemma2", "its scores are capped"), ("gptoss", "a logit without a value")]
)
def test_softcap_and_attention_sinks_use_torch(tiny, family, says):
    model = tiny(family, **({"num_local_experts": 2, "num_experts_per_tok": 1} if family == "gptoss" else {}))
    method = build("kivi", group=16, **WINDOWS)
    with pytest.raises(UsageError, match=f"all layers: .*{says}"), attach(model, method, backend="triton"):
        pass
    with attach(model, method) as kv:
        layers = list(zip(kv.layers, kv.plans, strict=True))
    assert choose_backend("auto", torch.device("cuda"), layers).summary.startswith("torch (all layers: ")


def test_unsupported_layers_use_torch(tiny):
    model = tiny("llama", head_dim=32).to(DEVICE)
    with attach(model, build("kivi", group=16, **WINDOWS)) as kv, attach(model, build("gear")) as other:
        plans = [kv.plans[0], other.plans[1], kv.plans[2]]
        chosen = choose_backend("auto", torch.device("cuda"), list(zip(kv.layers, plans, strict=True)))
    assert chosen.summary.startswith("triton") and "partly torch (layer 1: of the keys a low-rank" in chosen.summary
    assert [chosen.by_kernels(layer) for layer in range(3)] == [True, False, True]


@pytest.mark.slow
def test_sliding_windows(tiny, prompt):
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = tiny("gemma3", sliding_window=17, layer_types=kinds).to(DEVICE)
    same(model, build("kivi", group=16, **WINDOWS), prompt)


def test_step_has_constant_allocations_and_no_host_reads(one_layer, prompt, monkeypatch):
    """After the first step, counts, workspaces and stores keep their memory, and attention never synchronizes."""
    model, (ids, _) = one_layer((2, 1)), prompt(COLUMNS + 8)
    with attach(model, build("kivi", group=4, residual=4), backend="triton") as kv:
        cache = kv.new_cache(ids.shape[1])
        engine, places, asked = kv.backend._by_layer[0], [], []
        decode = engine.decode_attention

        def watched(*args):
            with monkeypatch.context() as patch:
                for name in ("item", "tolist", "__bool__", "__int__", "cpu", "numpy"):
                    patch.setattr(torch.Tensor, name, lambda *_, name=name: asked.append(name))
                patch.setattr(torch, "cat", lambda *_, **__: asked.append("cat"))
                return decode(*args)

        def read_only(query, keys, values, lengths, scaling, **given):
            tensors = [lengths, given["workspace"].partial, keys.ring, values.ring, keys.count, values.count]
            tensors += [keys.packed.codes, keys.packed.scale, values.packed.codes, values.packed.zero]
            places.append([x.data_ptr() for x in tensors])
            return torch.zeros_like(query)

        monkeypatch.setattr(triton_backend, "attend", read_only)
        monkeypatch.setattr(engine, "decode_attention", watched)
        model(ids[:, :COLUMNS].to(DEVICE), past_key_values=cache)
        for i in range(COLUMNS, ids.shape[1]):
            model(ids[:, i : i + 1].to(DEVICE), past_key_values=cache)
            if i == COLUMNS:
                asked.clear()
        assert len(places) == 8 and all(one == places[0] for one in places)
        assert asked == []
        assert engine._counts[0].tokens.tolist() == [ids.shape[1]]
        assert cache.report().working == {}


@pytest.mark.skipif(DEVICE.type != "cpu", reason="there is a GPU")
def test_cpu_without_the_interpreter_is_refused(fails, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET")
    fails("generate", "a", "--backend", "triton", code=2, says="--backend triton needs a GPU, the model is on cpu")


def test_commands_report_the_backend(kvq):
    result = kvq("generate", "a", "-n", 2, "--method", "fp16", "--backend", "torch")
    assert result.exit_code == 0 and result.stderr.strip().endswith("attention by torch")
    result = kvq("generate", "a", "-n", 3, "--method", "fp16", "--backend", "triton", "--json")
    assert json.loads(result.stdout)["cache"]["backend"].startswith("triton")


def test_counts_behind_dropped_tokens_are_kept_as_long_as_they_are_used():
    backend = triton_backend.TritonBackend()
    kept = [backend._counts_behind(number) for number in range(triton_backend.MAX_COUNTS)]
    assert all(backend._counts_behind(number) is counts for number, counts in enumerate(kept))
    assert backend._counts_behind(0) is kept[0]
    backend._counts_behind(100)
    assert backend._counts_behind(0) is kept[0] and 1 not in backend._counts

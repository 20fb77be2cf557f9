"""XQuant and XQuant-CL attached to a model: the layer input is cached, keys and values are rematerialized from it.

The reference here is a float64 computation of the papers' equations on the X that hooks see, with a quantizer written
out number by number; it shares nothing with the program but the factors U and S B^T.
"""

from __future__ import annotations

import pytest
import torch
from pairwise import parametrize_pairwise
from torch.overrides import TorchFunctionMode

from kvq_cli.attention.attach import attach
from kvq_cli.attention.capture_points import attention_modules
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build
from kvq_cli.upcast import _PRODUCTS, MIN_ROWS

HEADS = {"MHA": 4, "GQA": 2, "MQA": 1}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"partial_rotary_factor": 0.5},
    "gemma3": {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "olmo2": {},
    "cohere": {"use_qk_norm": True},
    "gemma2": {"attn_logit_softcapping": 2.0, "sliding_window": 7},
    "gptoss": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": 7},
}
SMALL = {"group": 4, "sinks": 3, "recent": 2}
IDENTITY = {"bits": 16, "base_bits": 16, **SMALL}


def with_random_biases(model):
    for name, parameter in model.named_parameters():
        if "proj.bias" in name:
            parameter.normal_()
    return model


def logits(model, ids, mask, cache, starts: list[int]) -> torch.Tensor:
    positions, outs = (mask.cumsum(1) - 1).clamp(min=0), []
    for begin, end in zip(starts, [*starts[1:], ids.shape[1]], strict=True):
        own = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        outs.append(model(ids[:, begin:end], past_key_values=cache, **own).logits)
    return torch.cat(outs, dim=1)


@pytest.mark.parametrize("name, base", [("xquant", 0), ("xquant-cl", 1), ("xquant-cl", 2)])
@pytest.mark.parametrize("family", FAMILIES)
def test_without_quantization_logits_are_unchanged(tiny, prompt, factored, family, name, base):
    model = with_random_biases(tiny(family, **FAMILIES[family]))
    (ids, mask), method = prompt(22, pads=(6, 0)), build(name, base_layers=base, **IDENTITY)
    own = model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0)).logits[mask.bool()]
    artifact = factored(model, method)
    for prefill, starts in (("compressed", [0]), ("exact", [0, 9, 20, 21])):
        with attach(model, artifact, prefill=prefill) as kv:
            cache = kv.new_cache()
            out = logits(model, ids, mask, cache, starts)[mask.bool()]
            torch.testing.assert_close(out, own, atol=5e-5 * own.abs().max().item(), rtol=1e-4)
            assert cache.report().compressed > 0


class LongProducts(TorchFunctionMode):
    """Lists the float16 products of `MIN_ROWS` rows or more."""

    def __init__(self) -> None:
        super().__init__()
        self.found = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _PRODUCTS and (left := args[_PRODUCTS[func]]).dtype == torch.float16:
            self.found += [func] * (left.shape[:-1].numel() >= MIN_ROWS)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["xquant", "xquant-cl"])
def test_a_decode_step_leaves_no_long_product_in_float16_to_a_slow_cpu(tiny, prompt, factored, name, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", "avx512_f": True})
    model, (ids, _) = tiny("llama", num_key_value_heads=2).half(), prompt(22)
    with attach(model, factored(model, build(name, bits=4, **SMALL))) as kv:
        cache = kv.new_cache()
        model(ids, past_key_values=cache)
        with LongProducts() as products:
            model(ids[:, :1], past_key_values=cache)
    assert not products.found


def quantized(x: torch.Tensor, bits: int, axis: int, group: int) -> torch.Tensor:
    """Asymmetric uniform quantization of float64 `[tokens, channels]` in groups along an axis, 16-bit scale, zero."""
    out = x.clone()
    for numbers, result in zip(x.split(group, axis), out.split(group, axis), strict=True):
        low, high = numbers.min(axis, keepdim=True).values, numbers.max(axis, keepdim=True).values
        zero, scale = low.half().double(), ((high - low) / (2**bits - 1)).half().double()
        result.copy_(((numbers - zero) / scale).round().clamp(0, 2**bits - 1) * scale + zero)
    return out


def watched(model, artifact, ids) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """X of each layer in an exact pass, and the keys (before RoPE) and values that the cache gives back in a step that
    comes after it, all `[tokens, ...]` of a single row."""
    inputs, keys, values = [], [], []
    with attach(model, artifact) as kv:
        hooks = [
            module.register_forward_pre_hook(lambda m, a, k: inputs.append(k["hidden_states"]), with_kwargs=True)
            for *_, module in attention_modules(model)
        ]
        cache = kv.new_cache()
        model(ids, past_key_values=cache)
        for hook in hooks:
            hook.remove()
        for layer in cache.layers:

            def release(layer=layer, release=layer.release):
                keys.append(layer.key_stream.read(0)[0].transpose(0, 1).flatten(1).double())
                values.append(layer.value_stream.read(0)[0].transpose(0, 1).flatten(1).double())
                release()

            layer.release = release
        model(ids[:, :1], past_key_values=cache)
    return [x[0].double() for x in inputs], keys, values


def weights(model, index: int) -> tuple[torch.Tensor, ...]:
    attention = model.model.layers[index].self_attn
    return tuple(
        p.double() for n in ("k_proj", "v_proj") for p in (getattr(attention, n).weight.T, getattr(attention, n).bias)
    )


def close(actual: torch.Tensor, expected: torch.Tensor, exact: slice) -> None:
    """Both are float computations of the same codes; where rounding flips one, a number moves by a step."""
    error = (actual - expected).abs() / expected.abs().max()
    assert error.quantile(0.98) < 1e-3 and error.max() < 0.2
    assert error[exact].max() < 1e-5


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_xquant_equals_its_definition(tiny, prompt, factored, heads, bits):
    model = with_random_biases(tiny("qwen2", num_key_value_heads=HEADS[heads]))
    (ids, _), method = prompt(28), build("xquant", bits=bits, group=8, sinks=3)
    artifact = factored(model, method)
    inputs, keys, values = watched(model, artifact, ids)
    packed = slice(3, 27)  # three groups of 8 after the sinks
    for i, x in enumerate(inputs):
        wk, bk, wv, bv = weights(model, i)
        if heads == "MHA":
            x = x.clone()
            x[packed] = quantized(x[packed], bits, 1, 8)
            expected = x @ wk + bk, x @ wv + bv
        else:
            expected = []
            for kind, w, b, axis in (("k", wk, bk, 0), ("v", wv, bv, 1)):
                down, up = (artifact.tensors[f"layers.{i}.{kind}.{name}"].double() for name in ("down", "up"))
                torch.testing.assert_close(down @ up, w, atol=1e-5, rtol=0)  # U S B^T = W
                torch.testing.assert_close(down.T @ down, torch.eye(down.shape[1]).double(), atol=1e-5, rtol=0)
                latent = x @ down
                latent[packed] = quantized(latent[packed], bits, axis, 8)
                expected.append(latent @ up + b)
        for actual, wanted in zip((keys[i], values[i]), expected, strict=True):
            close(actual[:28], wanted, slice(0, 3))


@parametrize_pairwise({"accumulator": [16, 8], "heads": HEADS, "bits": [2, 4]})
def test_xquant_cl_equals_its_definition(tiny, prompt, factored, heads, bits, accumulator):
    """K and V of layer i are X^_i W, X^_i = X^_{i-1} + Q((X_i - X^_{i-1}) U) U^T, from the base layer's X on."""
    model = with_random_biases(tiny("qwen2", num_key_value_heads=HEADS[heads], num_hidden_layers=5))
    method = build("xquant-cl", bits=bits, group=8, sinks=3, base_layers=2, accumulator_bits=accumulator)
    (ids, _), artifact, packed = prompt(28), factored(model, method), slice(3, 27)
    inputs, keys, values = watched(model, artifact, ids)
    total = None
    for i in range(1, 5):
        wk, bk, wv, bv = weights(model, i)
        if i == 1:
            total = quantized(inputs[1][packed], 4, 1, 8)
        elif heads == "MHA":
            total = total + quantized(inputs[i][packed] - total, bits, 1, 8)
        else:
            down = artifact.tensors[f"layers.{i}.x.down"].double()
            total = total + quantized((inputs[i][packed] - total) @ down, bits, 1, 8) @ down.T
        x = inputs[i].clone()
        x[packed] = total
        close(keys[i][:28], x @ wk + bk, slice(0, 3))
        close(values[i][:28], x @ wv + bv, slice(0, 3))
        if accumulator != 16:
            total = quantized(total, accumulator, 1, 8)


def test_closed_loop_error_does_not_grow_with_depth(tiny, prompt, factored):
    """Each layer's difference makes up for what the layers below lost. Open-loop sums of the same quantized steps
    lose more and more."""
    model = tiny("llama", num_key_value_heads=4, num_hidden_layers=12)
    for layer in model.model.layers:  # steps as small as in trained models: X changes little from layer to layer
        layer.self_attn.o_proj.weight.mul_(0.2)
        layer.mlp.down_proj.weight.mul_(0.2)
    (ids, _), method = prompt(40), build("xquant-cl", bits=2, group=16, base_layers=1)
    inputs, keys, _ = watched(model, factored(model, method), ids)
    errors, opened, total = [], [], quantized(inputs[0][:32], 4, 1, 16)
    for i, x in enumerate(inputs):
        weight = model.model.layers[i].self_attn.k_proj.weight.T.double()
        errors.append(((keys[i][:32] - x[:32] @ weight).norm() / (x[:32] @ weight).norm()).item())
        total = total if i == 0 else total + quantized(x[:32] - inputs[i - 1][:32], 2, 1, 16)
        opened.append(((total - x[:32]) @ weight).norm().item() / (x[:32] @ weight).norm().item())
    assert sum(errors[-4:]) < 1.3 * sum(errors[1:5]), errors
    assert sum(errors[-4:]) < 0.7 * sum(opened[-4:]), (errors, opened)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name, options", [("xquant", {}), ("xquant-cl", {"base_layers": 2})])
def test_report_counts_the_bytes_of_the_tensors_held(tiny, prompt, factored, name, options, heads):
    model = tiny("llama", num_key_value_heads=HEADS[heads])
    (ids, mask), method = prompt(60, pads=(5, 0)), build(name, bits=4, group=16, **options)
    with attach(model, factored(model, method)) as kv:
        cache = kv.new_cache()
        logits(model, ids, mask, cache, [0, 50, *range(55, 60)])
        report, held = cache.report(), 0
        for layer in cache.layers:
            assert len(layer.streams) == (1 if heads == "MHA" or layer.plan.shared else 2)
            for stream in layer.streams:
                tensors = [stream.sinks, stream.ring]
                tensors += [part.tensor for segment in stream.store.segments for part in segment.parts.values()]
                held += sum(t.numel() * t.element_size() for t in tensors)
        assert report.bytes == held
        # Nothing else in the cache holds tensors between passes: no X^, no copy of X, no keys, no values.
        assert not any(torch.is_tensor(x) for layer in cache.layers for x in vars(layer).values())
        assert all(not s.sums_below and not s.read_back for x in cache.layers if x.cross_layer for s in x.streams)
        assert not cache.layers[-1].cross_layer or not cache.layers[-1].cross_layer._accumulators
    numbers = 115 * model.config.num_hidden_layers * 2 * HEADS[heads] * 16
    assert report.numbers == numbers and report.fp16_bytes == 2 * numbers
    if name == "xquant":  # X is half of keys and values, where it is kept once
        assert report.packed_bits == (4 + 2) / (2 if heads == "MHA" else 1)
    else:
        # X^ of the layer below, and of the last layer or, under GQA, the latents of both: float32, three blocks a row.
        latents = 2 * HEADS[heads] * 16
        assert report.working["accumulator"] == 96 * 4 * (64 + (64 if heads == "MHA" else 2 * latents))
        assert "accumulator" in str(report)


def test_first_channel_in_sixteen_bits(tiny, prompt, factored):
    model, (ids, _) = tiny("llama"), prompt(40)
    errors = []
    for first in (False, True):
        artifact = factored(model, build("xquant", bits=1, group=8, first_channel=first))
        inputs, keys, _ = watched(model, artifact, ids)
        back = torch.linalg.pinv(artifact.tensors["layers.0.k.up"].double())
        latents = inputs[0] @ artifact.tensors["layers.0.k.down"].double()
        errors.append((keys[0][:40] @ back - latents).abs().amax(dim=0))
    assert errors[0][0] > 0.1 and errors[1][0] < 0.01
    torch.testing.assert_close(errors[0][1:], errors[1][1:], atol=1e-3, rtol=1e-3)


CASES = [("xquant", {"bits": 2}), ("xquant-cl", {"bits": 3, "base_layers": 2}), ("xquant-cl", {"axis": "channel"})]


@pytest.mark.parametrize("heads, head_dim", [("MHA", 80), ("GQA", 64), ("GQA", 96), ("MQA", 128)])
@pytest.mark.parametrize("name, options", CASES)
def test_batches_and_chunks_equal_single_rows_token_by_token(tiny, prompt, factored, name, options, heads, head_dim):
    width = HEADS[heads] * head_dim * (1 if heads == "MHA" else 2)
    model = tiny("llama", num_key_value_heads=HEADS[heads], head_dim=head_dim, hidden_size=width)
    ids, mask = prompt(44, pads=(9, 0))
    artifact = factored(model, build(name, **{**SMALL, "group": 8, "base_layers": 1, **options}))
    with attach(model, artifact, prefill="compressed") as kv:
        caches = [kv.new_cache() for _ in range(3)]
        whole = logits(model, ids, mask, caches[0], [0])
        parts = logits(model, ids, mask, caches[1], [0, 5, 30, *range(31, 44)])
        alone = logits(model, ids[:1, 9:], mask[:1, 9:], caches[2], [0, *range(20, 35)])
        for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
            assert (
                [s.lengths for s in one.streams] == [s.lengths for s in other.streams] == [[35, 44]] * len(one.streams)
            )
        lost = (whole - logits(model, ids, mask, None, [0])).abs()
    # Where rounding flips a code, a number moves by a step, and all later tokens a little: far from what compression
    # itself changes, which is what a token would differ by if it were seen exact here and packed there.
    for error, scale in (((parts - whole)[:, 9:].abs(), lost[:, 9:]), ((alone - whole[:1, 9:]).abs(), lost[:1, 9:])):
        assert error[0, :3].max() < 1e-4  # sinks of the padded row
        assert scale.mean() > 0.05 and error.mean() < 0.1 * scale.mean()


@pytest.mark.parametrize("name, options", CASES)
def test_one_pass_reads_the_newest_tokens_through_the_rounded_factors_too(tiny, prompt, factored, name, options):
    """As decoding does: factors in 16 bits, the model in 32."""
    model, (ids, mask) = tiny("llama").bfloat16(), prompt(44)
    artifact = factored(model, build(name, **{**SMALL, "group": 8, "base_layers": 1, **options}))
    with attach(model.float(), artifact, prefill="compressed") as kv:
        whole, parts = (logits(model, ids, mask, kv.new_cache(), starts) for starts in ([0], [*range(44)]))
    lossless = logits(model, ids, mask, None, [0])
    # Until the first flush no number is quantized: the rounding of the factors is all that is lost.
    assert (whole - lossless)[:, :5].abs().max() > 1e-3
    assert (whole - parts)[:, :5].abs().max() < 1e-4
    assert (whole - parts).abs().mean() < 0.1 * (whole - lossless).abs().mean()


@pytest.mark.parametrize("name", ["xquant", "xquant-cl"])
def test_reordered_beams_keep_their_layer_inputs(tiny, prompt, factored, name):
    """Rows are reordered with their layer inputs."""
    model, (ids, mask) = tiny("llama"), prompt(17, pads=(4, 0))
    search = {"num_beams": 3, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    own = model.generate(ids, attention_mask=mask, **search)
    with attach(model, factored(model, build(name, base_layers=1, **IDENTITY))) as kv:
        out = model.generate(ids, attention_mask=mask, past_key_values=kv.new_cache(), **search)
        assert kv.report().compressed > 0
    assert torch.equal(out, own)


def test_errors_fall_as_bits_rise(tiny, prompt, factored):
    model, (ids, mask) = tiny("llama", num_hidden_layers=4), prompt(60)
    own = model(ids).logits
    for name in ("xquant", "xquant-cl"):
        errors = []
        for bits in (2, 3, 4, 8):
            artifact = factored(model, build(name, bits=bits, base_bits=bits, base_layers=1, group=8))
            with attach(model, artifact, prefill="compressed") as kv:
                errors.append((logits(model, ids, mask, kv.new_cache(), [0]) - own).square().mean().item())
        assert all(worse > 1.5 * better for worse, better in zip(errors, errors[1:], strict=False)), errors


def test_artifact_is_required_for_latents(tiny, prompt):
    with pytest.raises(UsageError, match="kvq calibrate --method xquant"), attach(tiny("llama"), build("xquant")):
        pass
    model, (ids, _) = tiny("llama", num_key_value_heads=4), prompt(20)
    for name in ("xquant", "xquant-cl"):
        with attach(model, build(name, **SMALL)) as kv:
            model.generate(ids, past_key_values=kv.new_cache(), max_new_tokens=3, do_sample=False)
            assert kv.report().compressed > 0


def test_artifact_works_for_the_model_in_another_dtype(tiny, prompt, factored):
    """Factors of 16-bit weights are used with 32-bit weights, and the other way round."""
    (ids, _), method = prompt(20), build("xquant-cl", base_layers=2, **IDENTITY)
    model = tiny("llama").bfloat16()
    artifact = factored(model, method)
    own = model.float()(ids).logits
    for dtype in (torch.float32, torch.bfloat16):
        with attach(model.to(dtype), artifact, prefill="compressed") as kv:
            out = model(ids, past_key_values=kv.new_cache()).logits
            assert (out - own).abs().max() < 0.1 * own.abs().max()

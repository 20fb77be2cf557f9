"""Passes of 2 to 16 tokens behind a cache: by one launch of the kernel, with the logits of PyTorch's path."""

from __future__ import annotations

import pytest
import torch
from codec_methods import DEVICE, WINDOWS, CodecMethod, codebook, outliers, per_token
from tiers import slow, slow_cases

from kvq_cli.attention import torch_backend, triton_backend
from kvq_cli.attention.attach import attach
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.methods.registry import build
from kvq_cli.methods.window import Window

#: Tokens of each pass: a prompt, then short passes and decode steps.
PASSES = (41, 3, 1, 16, 1, 5)
BEHIND = len(PASSES) - 1
KIVI = {"bits": 2, "group": 16, "residual": 32}


def logits(model, method, prompt, backend: str, passes=PASSES, pads=(13, 0), **options) -> torch.Tensor:
    """Logits of all tokens behind the prompt, of two rows."""
    ids, mask = (x.to(DEVICE) for x in prompt(sum(passes), pads=pads))
    positions, outs, begin = (mask.cumsum(1) - 1).clamp(min=0), [], 0
    with attach(model, method, backend=backend, **options) as kv:
        cache = kv.new_cache()
        for count in passes:
            end = begin + count
            given = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
            out = model(ids[:, begin:end], past_key_values=cache, **given).logits
            outs.append(out[mask[:, begin:end].bool()])
            begin = end
        assert cache.report().compressed > 0
    return torch.cat(outs[1:]).float()


class Launches:
    """Counts launches of the split pass and short passes that PyTorch computes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from kvq_kernels.decode_attention import launch

        self.kernel, self.torch = 0, 0
        kernel, prefill = launch.split_kernel, torch_backend.prefill_attention

        class Counted:
            def __getitem__(_, grid):
                self.kernel += 1
                return kernel[grid]

        def counted(*args):
            self.torch += 1
            return prefill(*args)

        monkeypatch.setattr(launch, "split_kernel", Counted())
        monkeypatch.setattr(triton_backend.torch_backend, "prefill_attention", counted)


def same(model, method, prompt, monkeypatch, tolerance=2e-4, launches=BEHIND, **options) -> None:
    """Float32 models: the kernels' float32 products and PyTorch's differ in the order of their sums."""
    expected = logits(model, method, prompt, "torch", **options)
    counted = Launches(monkeypatch)
    actual = logits(model, method, prompt, "triton", **options)
    assert (actual - expected).abs().max() < tolerance * expected.abs().max()
    # Of a model of one layer, as many as passes behind the prompt: a short pass is one launch, as a decode step is.
    by_torch = len(options.get("passes", PASSES)) - launches - (options.get("prefill") != "compressed")
    assert (counted.kernel, counted.torch) == (launches, by_torch)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kivi", KIVI),
        ("innerq", {"bits": 2, **WINDOWS}),
        *slow_cases(
            ("fp16", {}),
            ("kivi", {"bits": 4, "group": 16, **WINDOWS}),
            ("kivi", {"bits": 2, "group": 16, "pre_rope": True, **WINDOWS}),
            ("squat", {"bits": 2, "group": 16, **WINDOWS}),
            ("innerq", {"bits": 4, "group": 16, "mode": "symmetric", **WINDOWS}),
        ),
    ],
)
def test_uniform_methods(one_layer, prompt, monkeypatch, name, options):
    same(one_layer((2, 1)), build(name, **options), prompt, monkeypatch)


@pytest.mark.parametrize(
    ("keys", "values", "options"),
    [
        (codebook((1, 1), 16, 32), per_token(0.0), {"window": Window(1, 0, 1)}),
        *slow_cases(
            (codebook(), codebook(normal=False), {}),
            (outliers, per_token(0.05), {"window": Window(1, 3, 32)}),
        ),
    ],
    ids=["scalars", "temporal", "outliers"],
)
def test_codebooks_of_keys_before_rope(one_layer, prompt, monkeypatch, keys, values, options):
    same(one_layer((4, 1)), CodecMethod(keys, values, **options), prompt, monkeypatch)


@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.bfloat16)])
def test_sixteen_bit_models(one_layer, prompt, monkeypatch, dtype):
    model = one_layer((2, 1)).to(dtype)
    same(model, build("kivi", **KIVI), prompt, monkeypatch, 8 * torch.finfo(dtype).eps)


def test_rows_that_begin_in_a_short_pass(one_layer, prompt, monkeypatch):
    """Row 0 has pads in the short pass, and its sinks come with it."""
    method = build("kivi", bits=2, group=16, sinks=5, recent=3)
    same(one_layer((2, 1)), method, prompt, monkeypatch, launches=3, passes=(40, 7, 9, 1), pads=(43, 0))


def test_sliding_windows(tiny, prompt, monkeypatch):
    """Each query has its own first token."""
    model = tiny("mistral", num_hidden_layers=1, sliding_window=17).to(DEVICE)
    same(model, build("kivi", **KIVI), prompt, monkeypatch)


@pytest.mark.parametrize("prefill", ["exact", "compressed"])
def test_sliding_windows_behind_dropped_tokens(tiny, prompt, monkeypatch, prefill):
    """Tokens are counted from behind the dropped ones, and keep their positions."""
    model, dropped, release = (
        tiny("mistral", num_hidden_layers=1, sliding_window=17).to(DEVICE),
        [],
        CompressedLayer.release,
    )

    def released(self):
        dropped.append(self.dropped)
        release(self)

    monkeypatch.setattr(CompressedLayer, "release", released)
    passes = (60, 3, *(1,) * 20, 16, 5, 9, 1)
    method = CodecMethod(codebook(), codebook(), window=Window(3, 5, 4))
    behind = {"exact": len(passes) - 1, "compressed": 21}[prefill]
    same(model, method, prompt, monkeypatch, launches=behind, passes=passes, pads=(2, 0), prefill=prefill)
    assert len(set(dropped)) > 3


def test_compressed_prefill(one_layer, prompt, monkeypatch):
    """Queries see what they would see one by one: by the kernel, unless tokens are packed between the first query and
    the last one. Here keys and values are packed 16 at a time, from token 37 of a row on."""
    method = CodecMethod(codebook(), codebook(), window=Window(3, 5, 16))
    options = {"prefill": "compressed", "passes": (41, 3, 1, 16, 1, 2), "pads": (0, 0)}
    same(one_layer((2, 1)), method, prompt, monkeypatch, launches=4, **options)


def test_long_passes_are_left_to_pytorch(one_layer, prompt, monkeypatch):
    same(one_layer((2, 1)), build("kivi", **KIVI), prompt, monkeypatch, launches=1, passes=(41, 17, 1))

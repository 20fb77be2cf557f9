"""Models whose weights are tensor subclasses, as those of quanto and torchao: digests, saved caches, refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_artifacts import random_parts, tiny_model
from torch import nn

from kvq_cli import attach, build, upcast
from kvq_cli.artifact import Artifact, fingerprint
from kvq_cli.artifact.fingerprint import weights_digest
from kvq_cli.errors import UsageError

KIVI = build("kivi", group=8, residual=16)


class Packed(torch.Tensor):
    """A weight as int8 codes and a scale in a tensor subclass of their own: it computes products, and nothing else."""

    @staticmethod
    def __new__(cls, codes, scale, unit):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)

    def __init__(self, codes, scale, unit):
        self.codes, self.scale, self.unit = codes, scale, unit

    def __tensor_flatten__(self):
        return ["codes", "scale"], {"unit": self.unit, "function": lambda: None}

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Packed(**inner, unit=context["unit"])

    def values(self):
        return (self.codes.float() * self.scale.float() / self.unit).to(self.scale.dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return Packed(args[0].codes, args[0].scale, args[0].unit)
        raise NotImplementedError(f"{func} of a quantized weight")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.nn.functional.linear:
            return func(args[0], args[1].values(), *args[2:], **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)


def quantized(dtype: torch.dtype = torch.float32, unit: int = 127):
    """A tiny model with keys' projections quantized; the scales of the first layer are again a quantized tensor."""
    model = tiny_model().to(dtype)
    for layer in model.model.layers:
        weight = layer.self_attn.k_proj.weight.detach()
        scale = weight.abs().amax(1, keepdim=True)
        codes = (weight / scale * 127).round().to(torch.int8)
        layer.self_attn.k_proj.weight = nn.Parameter(Packed(codes, scale, unit), requires_grad=False)
    first = model.model.layers[0].self_attn.k_proj.weight
    first.scale = Packed(torch.ones_like(first.scale, dtype=torch.int8), first.scale * unit, unit)
    first.values = lambda: (first.codes.float() * first.scale.scale.float() / unit**2).to(dtype)
    return model


def digests(model):
    return fingerprint(model), weights_digest(model)


@pytest.mark.parametrize("part", ["codes", "scale"])
@pytest.mark.parametrize("layer", [0, 1])
def test_digests_are_those_of_the_tensors_that_a_quantized_weight_holds(part, layer):
    model = quantized()
    before = digests(model)
    assert digests(quantized()) == before  # functions in the context are elsewhere in memory
    held = getattr(model.model.layers[layer].self_attn.k_proj.weight, part)
    held = held.scale if isinstance(held, Packed) else held
    held.view(-1)[-1] *= -1
    assert all(one != other for one, other in zip(digests(model), before, strict=True))


def test_digests_depend_on_how_the_tensors_are_read():
    assert all(one != other for one, other in zip(digests(quantized()), digests(quantized(unit=126)), strict=True))


def test_a_cache_of_a_quantized_model_is_saved_and_continues(tmp_path):
    model, ids = quantized(), torch.arange(3, 35)[None]
    with torch.no_grad(), attach(model, KIVI) as kv:
        cache = kv.new_cache()
        model(ids, past_key_values=cache)
        cache.save(tmp_path / "cache", ids)
        steps = [model(ids[:, :1], past_key_values=c).logits for c in (cache, kv.load_cache(tmp_path / "cache"))]
    assert torch.equal(*steps)


def test_factors_of_quantized_weights_are_refused():
    model, method = quantized(), build("xquant", bits=4, group=8)
    config, tensors = random_parts(method, tiny_model())
    config["model"]["fingerprint"] = fingerprint(model).to_dict()
    artifact = Artifact(config, tensors, Path("nowhere"))
    with pytest.raises(UsageError, match="layers.0.self_attn: k_proj has no plain weights"), attach(model, artifact):
        pass


@pytest.mark.parametrize("tokens", [4, 40])
def test_products_of_quantized_weights_are_left_to_them(tokens, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"architecture": "x86_64", "avx512_f": True})
    model, ids = quantized(torch.float16), torch.arange(tokens)[None] % 40
    with torch.no_grad():
        own = model(ids).logits
        upcast.upcast_forward_passes(model)
        torch.testing.assert_close(model(ids).logits, own, rtol=0.02, atol=0.02)

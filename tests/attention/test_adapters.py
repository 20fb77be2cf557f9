"""Adapters, as of PEFT: recognized when they are added, chosen, disabled or merged, in passes and in saved caches."""

from __future__ import annotations

import json

import accelerate
import pytest
import torch
from torch import nn

from kvq_cli.artifact.fingerprint import fingerprint, weights_digest
from kvq_cli.attention.attach import attach
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.models import configured_shape, model_shape


class Lora(nn.Module):
    """A linear layer with adapters of rank 2, as PEFT's `LoraLayer`."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.lora_A, self.lora_B = base, nn.ModuleDict(), nn.ModuleDict()
        self.active_adapters, self.merged_adapters, self.scaling = [], [], {}
        self.disable_adapters = False

    def add(self, name: str) -> None:
        torch.manual_seed(len(name))
        self.lora_A[name] = nn.Linear(self.base_layer.in_features, 2, bias=False)
        self.lora_B[name] = nn.Linear(2, self.base_layer.out_features, bias=False)
        self.requires_grad_(False)
        self.active_adapters, self.scaling[name] = [name], 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.base_layer(x)
        if not self.disable_adapters and not self.merged_adapters:
            for name in self.active_adapters:
                out = out + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return out

    def merge(self) -> None:
        for name in self.active_adapters:
            self.base_layer.weight.data += self.lora_B[name].weight @ self.lora_A[name].weight * self.scaling[name]
        self.merged_adapters = list(self.active_adapters)


def adapted(model: nn.Module) -> list[Lora]:
    return [module for module in model.modules() if isinstance(module, Lora)]


def add(model: nn.Module, name: str) -> None:
    """Add an adapter to queries, keys and values, and choose it."""
    for layer in model.model.layers:
        for part in ("q_proj", "k_proj", "v_proj"):
            if not isinstance(getattr(layer.self_attn, part), Lora):
                setattr(layer.self_attn, part, Lora(getattr(layer.self_attn, part)))
    for module in adapted(model):
        module.add(name)


def choose(model: nn.Module, *names: str) -> None:
    for module in adapted(model):
        module.active_adapters = list(names)


def disable(model: nn.Module, disabled: bool = True) -> None:
    for module in adapted(model):
        module.disable_adapters = disabled


CHANGES = {
    "add": lambda model: add(model, "third"),
    "choose": lambda model: choose(model, "a"),
    "disable": disable,
    "scale": lambda model: [module.scaling.update(bb=1.0) for module in adapted(model)],
}


@pytest.fixture
def model(tiny):
    """With two adapters, of which "bb" is chosen."""
    model = tiny("llama")
    add(model, "a")
    add(model, "bb")
    return model


def same_as_the_models_own(model, kv, ids) -> None:
    actual = model(ids, past_key_values=kv.new_cache()).logits
    torch.testing.assert_close(actual, model(ids).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("source", ["post_rope", "pre_rope"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_cache_belongs_to_the_adapters_that_computed_it(model, probe, prompt, source, change):
    ids, _ = prompt(20)
    with attach(model, probe(source=source, codec="identity"), prefill="compressed") as kv:
        same_as_the_models_own(model, kv, ids)
        cache = kv.new_cache()
        model(ids, past_key_values=cache)
        CHANGES[change](model)
        with pytest.raises(UsageError, match="adapters have changed since this cache"):
            model(ids[:, :1], past_key_values=cache)
        same_as_the_models_own(model, kv, ids)


def replace(model: nn.Module) -> None:
    """Another adapter with the name of the chosen one."""
    for module in adapted(model):
        old = module.lora_B["bb"].weight
        module.add("bb")
        module.lora_B["bb"].weight.data.copy_(-old)


def swap(model: nn.Module) -> None:
    for module in adapted(model):
        module.lora_B["bb"].weight.data = -module.lora_B["bb"].weight


def edit(model: nn.Module) -> None:
    for module in adapted(model):
        module.lora_B["bb"].weight.neg_()


@pytest.mark.parametrize("change", [replace, swap, edit])
def test_an_adapter_of_the_same_name_is_another_one(model, probe, prompt, tmp_path, change):
    (ids, _), path = prompt(20), tmp_path / "cache.safetensors"
    with attach(model, probe(codec="identity"), prefill="compressed") as kv, torch.no_grad():
        cache = kv.new_cache()
        model(ids, past_key_values=cache)
        cache.save(path, ids)
        change(model)
        with pytest.raises(UsageError, match="adapters have changed since this cache"):
            model(ids[:, :1], past_key_values=cache)
        with pytest.raises(UsageError, match="belongs to"):
            kv.load_cache(path)
        same_as_the_models_own(model, kv, ids)


def test_an_offloaded_adapter_is_the_same_in_each_pass(model, probe, prompt):
    """accelerate puts other tensors in the place of its weights before and after a pass."""
    ids, _ = prompt(20)
    with torch.no_grad():
        expected = model(ids).logits
    accelerate.cpu_offload(model, execution_device="cpu")
    with attach(model, probe(codec="identity"), prefill="compressed") as kv, torch.no_grad():
        assert any(weight.is_meta for module in adapted(model) for weight in module.lora_B.parameters())
        cache = kv.new_cache()
        logits = [model(part, past_key_values=cache).logits for part in ids.split(10, dim=1)]
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, atol=2e-5, rtol=1e-4)


def test_a_cache_continues_with_the_adapters_that_computed_it(model, probe, prompt):
    """Also merged, which changes the rounding alone."""
    ids, _ = prompt(20)
    with attach(model, probe(codec="identity"), prefill="compressed") as kv:
        cache = kv.new_cache()
        model(ids[:, :18], past_key_values=cache)
        expected = model(ids).logits[:, 18:]
        choose(model, "a")
        choose(model, "bb")
        steps = [model(ids[:, 18:19], past_key_values=cache).logits]
        for module in adapted(model):
            module.merge()
        steps.append(model(ids[:, 19:], past_key_values=cache).logits)
    torch.testing.assert_close(torch.cat(steps, dim=1), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("source", ["post_rope", "pre_rope"])
def test_an_adapter_around_a_module_that_is_read_needs_a_new_attach(tiny, probe, prompt, source):
    model, (ids, _) = tiny("llama"), prompt(20)
    method = probe(source=source, codec="identity")
    with attach(model, method, prefill="compressed") as kv:
        cache = kv.new_cache()
        model(ids, past_key_values=cache)
        add(model, "a")
        with pytest.raises(UsageError, match="adapters have changed"):
            model(ids[:, :1], past_key_values=cache)
        if source == "post_rope":
            same_as_the_models_own(model, kv, ids)
        else:
            with pytest.raises(UsageError, match=r"layers.0.self_attn.k_proj was replaced.*attach anew"):
                model(ids, past_key_values=kv.new_cache())
    with attach(model, method, prefill="compressed") as kv:
        same_as_the_models_own(model, kv, ids)


def test_saved_caches_belong_to_adapters(model, probe, prompt, tmp_path):
    (ids, _), path = prompt(20), tmp_path / "cache.safetensors"
    with attach(model, probe()) as kv:
        cache = kv.new_cache()
        model(ids, past_key_values=cache)
        cache.save(path, ids)
        expected = model(ids[:, :1], past_key_values=kv.load_cache(path)).logits
        for other in (("a",), ("a", "bb"), ()):
            choose(model, *other)
            with pytest.raises(UsageError, match="belongs to"):
                kv.load_cache(path)
            with pytest.raises(UsageError, match="adapters have changed"):
                cache.save(tmp_path / "other.safetensors", ids)
        choose(model, "bb")
        assert torch.equal(model(ids[:, :1], past_key_values=kv.load_cache(path)).logits, expected)


def test_a_model_is_known_by_the_adapters_that_it_applies(tiny):
    model = tiny("llama")
    base = fingerprint(model), weights_digest(model)
    add(model, "a")
    active = fingerprint(model), weights_digest(model)
    add(model, "bb")
    both = fingerprint(model), weights_digest(model)
    choose(model, "a")
    assert (fingerprint(model), weights_digest(model)) == active
    disable(model)
    assert (fingerprint(model), weights_digest(model)) == base
    disable(model, False)
    for module in adapted(model):
        module.merge()
    merged = fingerprint(model), weights_digest(model)
    assert all(len(set(side)) == 4 for side in zip(base, active, both, merged, strict=True))


def test_folder_of_an_adapter(tiny, tmp_path, monkeypatch):
    """The weights are for PEFT to load; the sizes are those of the base model."""
    base, folder = tiny("llama"), tmp_path / "adapter"
    base.config.dtype = "float32"
    base.config.save_pretrained(tmp_path / "base")
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path / "base")}))
    monkeypatch.setattr("kvq_cli.models.find_spec", lambda _name: None)
    with pytest.raises(KvqError, match="adapter .* needs PEFT: pip install peft"):
        configured_shape(str(folder))
    base.config.save_pretrained(folder)  # transformers would load the model without its adapter
    with pytest.raises(KvqError, match="pip install peft"):
        configured_shape(str(folder))
    (folder / "config.json").unlink()
    monkeypatch.setattr("kvq_cli.models.find_spec", lambda _name: "installed")
    assert configured_shape(str(folder)) == model_shape(base)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(KvqError, match="names no base model"):
        configured_shape(str(folder))


def test_prefix_tuning_is_refused_where_it_would_replace_the_cache(model, probe):
    with attach(model, probe(codec="identity")) as kv, pytest.raises(UsageError, match="prefix tuning"):
        kv.new_cache().max_cache_len  # noqa: B018  # PEFT reads it, of caches that are no DynamicCache

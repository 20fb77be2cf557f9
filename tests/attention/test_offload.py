"""Models whose weights accelerate keeps elsewhere: attached, saved and told apart as the same models without that."""

from __future__ import annotations

from pathlib import Path

import accelerate
import pytest
import torch
from model_matrix import ready_method, tiny_model

from kvq_cli import attach, build
from kvq_cli.artifact import fingerprint
from kvq_cli.artifact.fingerprint import weights_digest
from kvq_cli.errors import KvqError
from kvq_cli.models import LoadedModel, model_shape
from kvq_cli.offload import stored_weight

IDS = torch.arange(3, 50)[None]


def offloaded(model, where: str, folder: Path):
    if where == "cpu":
        return accelerate.cpu_offload(model, execution_device="cpu")
    if where == "disk":
        return accelerate.disk_offload(model, str(folder), execution_device="cpu")
    places = {f"model.{name}": "cpu" for name, _ in model.model.named_children() if name != "layers"}
    places |= {f"model.layers.{layer}": "cpu" for layer in range(3)} | {"model.layers.1": "disk", "lm_head": "cpu"}
    return accelerate.dispatch_model(model, places, main_device="cpu", offload_dir=str(folder))


def answer(model, method, path: Path):
    """Logits of a prompt, and of a token with the cache after it was saved and loaded."""
    with torch.no_grad(), attach(model, method) as kv:
        cache = kv.new_cache()
        prompt = model(IDS, past_key_values=cache).logits
        cache.save(path, IDS)
        return prompt, model(IDS[:, :1], past_key_values=kv.load_cache(path)).logits


@pytest.mark.parametrize("where", ["cpu", "disk", "mixed"])
@pytest.mark.parametrize("name", ["kivi", "xquant"])
def test_an_offloaded_model_answers_as_it_does_in_memory(name, where, tmp_path):
    """Qwen2 has biases, which are rematerialized with the weights of layer inputs."""
    model = tiny_model("qwen2")
    method = ready_method(model, build(name, bits=4, group=16))
    expected, identity = answer(model, method, tmp_path / "cache"), (fingerprint(model), weights_digest(model))
    model = offloaded(model, where, tmp_path / "weights")
    assert any(weight.device.type == "meta" for weight in model.parameters())
    assert (fingerprint(model), weights_digest(model)) == identity
    for logits, own in zip(answer(model, method, tmp_path / "again"), expected, strict=True):
        assert torch.equal(logits, own)
    with attach(model, method) as kv:
        assert kv.load_cache(tmp_path / "cache").get_seq_length() == IDS.shape[1]


def test_layer_inputs_are_rematerialized_with_weights_that_are_fetched(tmp_path):
    model, method = tiny_model("llama", num_key_value_heads=4), build("xquant", bits=4, group=16)
    expected = answer(model, method, tmp_path / "cache")
    for logits, own in zip(answer(offloaded(model, "disk", tmp_path), method, tmp_path / "a"), expected, strict=True):
        assert torch.equal(logits, own)


def test_weights_without_numbers_are_refused():
    with torch.device("meta"):
        model = tiny_model("llama")
    with pytest.raises(KvqError, match="device meta, without numbers"), attach(model, build("fp16")):
        pass
    with pytest.raises(KvqError, match=r"weight model.norm.weight is on the device meta"):
        stored_weight(model, "model.norm.weight", model.model.norm.weight)


def test_evaluation_and_calibration_refuse_offloaded_weights():
    model = accelerate.cpu_offload(tiny_model("llama"))
    with pytest.raises(KvqError, match="model 'mine' are on the device meta.* need all weights on one device"):
        LoadedModel(model, None, "mine", None, model_shape(model))

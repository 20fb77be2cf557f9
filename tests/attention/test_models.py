"""Loading models, and the errors for models that cannot be loaded."""

from __future__ import annotations

import os

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from kvq_cli.attention.attach import attach
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.registry import build
from kvq_cli.models import load_model, model_context, model_shape, torch_device
from kvq_cli.reference import model_path


def test_model_shape(tiny):
    shape = model_shape(tiny("qwen3"))
    assert (shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim) == (3, 4, 2, 16)
    assert (shape.hidden_size, shape.dtype) == (64, "float32")
    assert model_context(tiny("llama", max_position_embeddings=40).config) == 40


SCALED_ROPE = [
    ("qwen3", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),  # 40: with an answer
    ("llama", {"rope_type": "yarn", "factor": 2.0}, 80),
    ("llama", {"rope_type": "yarn", "factor": 10.0, "original_max_position_embeddings": 4}, 40),  # scaled already
    ("llama", {"rope_type": "linear", "factor": 2.5}, 100),
    ("llama", {"type": "dynamic", "factor": 4.0}, 160),
    ("llama", {"rope_type": "default", "factor": 4.0}, 40),
    (
        "llama",
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        | {"original_max_position_embeddings": 5},
        40,
    ),
    ("gemma3_text", {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}}, 40),
    (
        "olmo3",
        {"full_attention": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32}}
        | {"sliding_attention": {"rope_type": "default"}},
        256,
    ),
]


@pytest.mark.parametrize(("model_type", "rope", "context"), SCALED_ROPE)
def test_scaled_rope_lengthens_the_context(model_type, rope, context):
    each = [rope] if "factor" in rope else rope.values()
    for parameters in each:
        parameters["rope_theta"] = 1e4
    config = transformers.CONFIG_MAPPING[model_type](max_position_embeddings=40, rope_parameters=rope)
    assert model_context(config) == context


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic"])
def test_prompts_fill_a_scaled_context(tiny, prompt, kind):
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    model, (ids, _) = tiny("llama", rope_parameters=rope, max_position_embeddings=32), prompt(65)
    expected = model(ids[:, :64]).logits
    with attach(model, build("fp16"), prefill="compressed") as kv:
        torch.testing.assert_close(model(ids[:, :64], past_key_values=kv.new_cache()).logits, expected)
        with pytest.raises(UsageError, match="65 tokens, the model's context is 64"):
            model(ids, past_key_values=kv.new_cache())


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-here", "a/b/c", " ", ""])
def test_missing_folder_is_refused(name):
    with pytest.raises(KvqError, match="no such folder"):
        load_model(name)


def test_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(KvqError, match="not a model folder: config.json is missing"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(KvqError, match="cannot load the model"):
        load_model(str(tmp_path))


def test_missing_weights_are_refused(tiny, tmp_path):
    """transformers would initialize them at random without an error."""
    name, other = "model.layers.1.self_attn.k_proj.weight", "model.layers.2.mlp.up_proj.weight"
    AutoTokenizer.from_pretrained(model_path()).save_pretrained(tmp_path)
    tiny("llama").save_pretrained(tmp_path)
    load_model(str(tmp_path))
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    cut = {**weights, name: weights[name][:-1].clone()}
    for wrong, says in (
        (cut, f"the weights {name}$"),
        ({key: value for key, value in cut.items() if key != other}, f"the weights {name} and 1 more$"),
    ):
        save_file(wrong, file, metadata={"format": "pt"})
        with pytest.raises(KvqError, match=says):
            load_model(str(tmp_path))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(KvqError, match="cannot load the model"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(KvqError, match="cannot load the model"):
        load_model(str(tmp_path))


@pytest.mark.parametrize("left", [0, 100, 20_000])
def test_truncated_weights_of_torch_save_are_refused(tiny, tmp_path, left):
    AutoTokenizer.from_pretrained(model_path()).save_pretrained(tmp_path)
    tiny("llama").save_pretrained(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    load_model(str(tmp_path))
    os.truncate(tmp_path / "pytorch_model.bin", left)
    with pytest.raises(KvqError, match="cannot load the model"):
        load_model(str(tmp_path))


def test_folder_without_a_tokenizer_is_refused(tiny, tmp_path):
    tiny("llama").save_pretrained(tmp_path)
    with pytest.raises(KvqError, match="the folder has no tokenizer; save it there, too"):
        load_model(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(KvqError, match="cannot load the model .*: its tokenizer: "):
        load_model(str(tmp_path))


def test_hub_model_without_a_network_is_refused():
    with pytest.raises(KvqError) as error:
        load_model("nobody/no-such-model-of-kvq")
    assert "nobody/no-such-model-of-kvq" in str(error.value) and "\n" not in str(error.value)


def test_devices_and_dtypes():
    assert torch_device("cpu") == torch.device("cpu")
    for name in ("gpu", "meta", "mps"):
        with pytest.raises(UsageError, match=f"--device {name}"):
            torch_device(name)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="0 CUDA devices"):
            torch_device("cuda")
    with pytest.raises(UsageError, match="--dtype int8: unknown; valid: auto, bfloat16, float16, float32"):
        load_model("reference", dtype="int8")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (transformers.MambaConfig(), "type mamba has no attention heads"),
        (transformers.DeepseekV3Config(), "type deepseek_v3 has latent attention"),
        (transformers.BloomConfig(), "type bloom adds ALiBi biases"),
        (transformers.MptConfig(), "type mpt adds ALiBi biases"),
        (transformers.FalconConfig(alibi=True), "type falcon adds ALiBi biases"),
        (transformers.T5Config(), "T5Config"),
    ],
)
def test_sizes_of_unsupported_models_are_refused(fails, tmp_path, config, says):
    """A latent cache would be counted as if every head had its keys and values."""
    config.save_pretrained(tmp_path / "model")
    fails("bits", "--model", "model", "--method", "fp16", code=1 if "T5" in says else 2, says=says)


def test_the_models_gpu_becomes_the_current_device(monkeypatch):
    """Of several GPUs: kernels and graphs take the current one."""
    selected = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: selected.append(str(device)))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.nn.Module, "to", lambda model, device: model)
    for name in ("cpu", "cuda:1"):
        load_model(device=name)
    assert selected == ["cuda:1"]

"""Loading a model, and the one line that says why it could not be."""

from __future__ import annotations

import pytest
import torch

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.models import load_model, model_context, model_shape, torch_device


def test_shape_of_a_model(tiny):
    shape = model_shape(tiny("qwen3"))
    assert (shape.layers, shape.query_heads, shape.kv_heads, shape.head_dim) == (3, 4, 2, 16)
    assert (shape.hidden_size, shape.dtype) == (64, torch.float32)
    assert model_context(tiny("llama", max_position_embeddings=40).config) == 40


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere-here", "a/b/c", " "])
def test_no_such_folder(name):
    with pytest.raises(KvqError, match="no such folder"):
        load_model(name)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(KvqError, match="no config.json"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(KvqError, match="cannot load the model"):
        load_model(str(tmp_path))


def test_a_hub_model_without_a_network():
    with pytest.raises(KvqError) as error:
        load_model("nobody/no-such-model-of-kvq")
    assert "nobody/no-such-model-of-kvq" in str(error.value) and "\n" not in str(error.value)


def test_devices_and_dtypes():
    assert torch_device("cpu") == torch.device("cpu")
    with pytest.raises(UsageError, match="--device gpu"):
        torch_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="0 CUDA devices"):
            torch_device("cuda")
    with pytest.raises(UsageError, match="--dtype int8: unknown; valid: auto, bfloat16, float16, float32"):
        load_model("reference", dtype="int8")

"""Keys are un-rotated by the rotation that the model's own layers apply."""

import pytest
import torch
from transformers import AutoModelForCausalLM, CohereConfig, GlmConfig, LlamaConfig, Phi3Config, Qwen3Config

from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.attention.rotary import Rotation
from kvq_cli.vllm.rope import _agree, layer_rotations, unrotate

SIZES = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, **HEADS),
    "yarn": LlamaConfig(**SIZES, **HEADS, rope_parameters=YARN),
    "qwen3, head_dim of its own": Qwen3Config(**SIZES, **HEADS, head_dim=32),
    "phi3, partial": Phi3Config(**SIZES, **HEADS, partial_rotary_factor=0.5),
    "glm, interleaved and partial": GlmConfig(**SIZES, **HEADS, head_dim=16),
    "cohere, interleaved": CohereConfig(**SIZES, **HEADS),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_rotations_of_a_model_are_found_without_its_weights(name):
    config = CONFIGS[name]
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        layers = attention_layers(model)
    head_dim = layers[0].probe.key.shape[-1]
    found = layer_rotations(config, head_dim)
    assert len(found) == 2
    for rotation, layer in zip(found, layers, strict=True):
        assert rotation.same(layer.rotation) and rotation.head_dim == head_dim


@pytest.mark.parametrize(("style", "scale"), [("half", 1.0), ("half", 1.3), ("interleaved", 1.0), ("none", 1.0)])
def test_unrotate_inverts_the_rotation(style, scale):
    torch.manual_seed(0)
    frequencies = torch.zeros(0) if style == "none" else 10000 ** -(torch.arange(12) / 12)
    rotation, keys = Rotation(style, frequencies, 32, scale), torch.randn(1, 2, 700, 32)
    rotated = rotation.at(keys, 100)
    places = torch.arange(100, 100 + keys.shape[-2])
    error = (unrotate(rotation, rotated, places) - keys).abs().max()
    assert error <= 3e-7 * keys.abs().max()
    assert unrotate(rotation, rotated.bfloat16(), places).dtype == torch.bfloat16


def test_tables_of_another_base_or_width_do_not_agree():
    rotation = Rotation("half", 10000 ** -(torch.arange(8) / 8), 16)
    angles = torch.arange(50).unsqueeze(1) * rotation.frequencies
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    assert _agree(rotation, table, [0, 1, 49])
    assert _agree(rotation, table.bfloat16(), [0, 1, 49])
    assert not _agree(rotation, torch.cat([(angles / 2).cos(), (angles / 2).sin()], dim=-1), [0, 1, 49])
    assert not _agree(rotation, table[:, :8], [0, 1])
    assert not _agree(rotation, table[:10], [0, 49])

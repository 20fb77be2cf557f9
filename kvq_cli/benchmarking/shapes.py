"""Models of known shapes with random weights: speed and memory do not depend on what the weights say."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from kvq_cli.errors import UsageError

#: layers, hidden size, feed-forward size, query heads, kv heads, vocabulary
SHAPES = {
    "tiny": (2, 128, 256, 4, 2, 256),
    "llama-3.2-1b": (16, 2048, 8192, 32, 8, 128256),
    "llama-3.2-3b": (28, 3072, 8192, 24, 8, 128256),
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128256),
}


def random_model(shape: str, device: torch.device, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    """A Llama of a known shape with weights drawn from `seed`. UsageError lists the shapes there are."""
    if shape not in SHAPES:
        raise UsageError(f"--random {shape}: unknown shape; valid: {', '.join(SHAPES)}")
    layers, hidden, feed_forward, heads, kv_heads, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocabulary,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device).eval().requires_grad_(False)

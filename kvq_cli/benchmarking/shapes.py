"""Models of known shapes: their numbers, and instances with random weights, as fast and as large as the real ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from kvq_cli.errors import UsageError
from kvq_cli.methods.base import ModelShape

#: Tokens that instances of all shapes are made for.
CONTEXT = 131072


@dataclass(frozen=True)
class Shape:
    """The numbers of a Llama. tied: the output embedding is the input embedding."""

    layers: int
    hidden_size: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads

    @property
    def layer_parameters(self) -> int:
        """Numbers in the weights of a layer."""
        attention = 2 * self.hidden_size * (self.heads + self.kv_heads) * self.head_dim
        return attention + 3 * self.hidden_size * self.feed_forward + 2 * self.hidden_size

    @property
    def parameters(self) -> int:
        """Numbers in all weights."""
        embeddings = self.vocabulary * self.hidden_size * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden_size

    def model_shape(self, dtype: torch.dtype = torch.float16) -> ModelShape:
        """What a method's plan needs."""
        return ModelShape(self.layers, self.heads, self.kv_heads, self.head_dim, self.hidden_size, dtype)


SHAPES = {
    "tiny": Shape(2, 128, 256, 4, 2, 256, tied=True),
    "reference": Shape(8, 256, 448, 4, 2, 4096, tied=True),
    "llama-2-7b": Shape(32, 4096, 11008, 32, 32, 32000),
    "llama-2-13b": Shape(40, 5120, 13824, 40, 40, 32000),
    "llama-3.1-8b": Shape(32, 4096, 14336, 32, 8, 128256),
    "llama-3.2-1b": Shape(16, 2048, 8192, 32, 8, 128256, tied=True),
    "llama-3.2-3b": Shape(28, 3072, 8192, 24, 8, 128256, tied=True),
    "mistral-7b": Shape(32, 4096, 14336, 32, 8, 32000),
}


def known_shape(name: str, flag: str) -> Shape:
    """The shape of a name; UsageError, naming `flag`, lists the shapes there are."""
    if name not in SHAPES:
        raise UsageError(f"{flag} {name}: unknown shape; valid: {', '.join(SHAPES)}")
    return SHAPES[name]


def random_model(
    shape: str, device: torch.device, dtype: torch.dtype, seed: int, layers: int | None = None
) -> PreTrainedModel:
    """A Llama of a known shape (or some of its layers) with weights drawn from `seed`. UsageError lists the shapes."""
    numbers = known_shape(shape, "--random")
    config = LlamaConfig(
        num_hidden_layers=layers or numbers.layers,
        hidden_size=numbers.hidden_size,
        intermediate_size=numbers.feed_forward,
        num_attention_heads=numbers.heads,
        num_key_value_heads=numbers.kv_heads,
        vocab_size=numbers.vocabulary,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=numbers.tied,
    )
    torch.manual_seed(seed)
    with device:  # where billions of numbers are drawn in no time
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.to(device).eval().requires_grad_(False)

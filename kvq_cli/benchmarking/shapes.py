"""Shapes of known models, and Llama models of these shapes with random weights, as fast and large as real ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvq_cli.errors import UsageError, did_you_mean
from kvq_cli.lazy import torch
from kvq_cli.methods.base import ModelShape

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Maximum context of all models with random weights, in tokens.
CONTEXT = 131072


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama model, or of one that differs from it in norms alone. context: the longest that the model is
    made for, in tokens. tied: input and output embeddings share their weights. head_size: where it is not
    hidden_size / heads. more_norms: weights of a layer's norms beyond Llama's. local: (tokens, period): queries see the
    newest tokens alone, but in every `period`-th layer."""

    layers: int
    hidden_size: int
    feed_forward: int
    heads: int
    kv_heads: int
    vocabulary: int
    context: int = CONTEXT
    tied: bool = False
    head_size: int | None = None
    more_norms: int = 0
    local: tuple[int, int] | None = None

    @property
    def head_dim(self) -> int:
        return self.head_size or self.hidden_size // self.heads

    @property
    def layer_parameters(self) -> int:
        """The number of weights of a layer."""
        attention = 2 * self.hidden_size * (self.heads + self.kv_heads) * self.head_dim
        return attention + 3 * self.hidden_size * self.feed_forward + 2 * self.hidden_size + self.more_norms

    @property
    def parameters(self) -> int:
        """The number of all weights."""
        embeddings = self.vocabulary * self.hidden_size * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + embeddings + self.hidden_size

    def model_shape(self, dtype: str = "float16") -> ModelShape:
        """Return the shape as `Method.plan` takes it."""
        shape = ModelShape(self.layers, self.heads, self.kv_heads, self.head_dim, self.hidden_size, dtype)
        if self.local is None:
            return shape
        window, period = self.local
        windows = tuple(None if (layer + 1) % period == 0 else window for layer in range(self.layers))
        return replace(shape, windows=windows, context=self.context)


SHAPES = {
    "tiny": LlamaShape(2, 128, 256, 4, 2, 256, tied=True),
    "reference": LlamaShape(8, 256, 448, 4, 2, 4096, 4096, tied=True),
    "llama-2-7b": LlamaShape(32, 4096, 11008, 32, 32, 32000, 4096),
    "llama-2-13b": LlamaShape(40, 5120, 13824, 40, 40, 32000, 4096),
    "llama-3.1-8b": LlamaShape(32, 4096, 14336, 32, 8, 128256, 131072),
    "llama-3.2-1b": LlamaShape(16, 2048, 8192, 32, 8, 128256, 131072, tied=True),
    "llama-3.2-3b": LlamaShape(28, 3072, 8192, 24, 8, 128256, 131072, tied=True),
    "mistral-7b": LlamaShape(32, 4096, 14336, 32, 8, 32000, 32768),
    # Behind attention and MLP are norms, too, and of queries and keys.
    "gemma3-270m": LlamaShape(
        18, 640, 2048, 4, 1, 262144, 32768, True, head_size=256, more_norms=2 * (640 + 256), local=(512, 6)
    ),
}


def known_shape(name: str, flag: str) -> LlamaShape:
    """Return the shape with this name; UsageError, naming `flag`, lists the known ones."""
    if name not in SHAPES:
        raise UsageError(f"{flag} {name}: unknown shape; valid: {', '.join(SHAPES)}{did_you_mean(name, SHAPES)}")
    return SHAPES[name]


def random_model(
    shape: str, device: torch.device, dtype: torch.dtype, seed: int, layers: int | None = None
) -> PreTrainedModel:
    """Return a Llama model of a known shape, or its first `layers`, with random weights drawn with `seed`.

    UsageError for an unknown shape.
    """
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = known_shape(shape, "--random")
    config = LlamaConfig(
        num_hidden_layers=layers or sizes.layers,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.feed_forward,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=sizes.tied,
    )
    torch.manual_seed(seed)
    with device:  # a GPU draws billions of random numbers fast
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return model.to(device).eval().requires_grad_(False)

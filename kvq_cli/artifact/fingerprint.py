"""Which model an artifact belongs to: the numbers of its architecture and a hash of its key/value projections."""

from __future__ import annotations

import hashlib
import re
from dataclasses import asdict, dataclass

import torch

# The weights that keys and values are made with, under the names that transformers' models give them.
_KEY_VALUE_WEIGHTS = re.compile(r"\.(k_proj|v_proj|qkv_proj|kv_proj|k_norm|query_key_value|Wqkv|c_attn)\.")


@dataclass(frozen=True)
class Fingerprint:
    """Equal fingerprints: the same architecture and the same key and value weights."""

    model_type: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    weights: str  # sha256

    def to_dict(self) -> dict:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.model_type}, {self.layers} layers, {self.kv_heads} kv heads of {self.head_dim}, "
            f"weights {self.weights[:8]}"
        )


def fingerprint(model) -> Fingerprint:
    """The fingerprint of a transformers causal language model.

    The weights are hashed as bfloat16, so that a 16-bit checkpoint has one fingerprint whether it is loaded in 16 or in
    32 bits, and on any device.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    return Fingerprint(
        model_type=config.model_type,
        layers=config.num_hidden_layers,
        query_heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        weights=_hash_weights(model),
    )


def _hash_weights(model) -> str:
    digest = hashlib.sha256()
    for name, weight in sorted(model.named_parameters()):
        if _KEY_VALUE_WEIGHTS.search(name):
            digest.update(f"{name} {tuple(weight.shape)}\n".encode())
            exact = weight.detach().to("cpu", torch.bfloat16 if weight.is_floating_point() else weight.dtype)
            digest.update(exact.contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()

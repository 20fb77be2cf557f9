"""Model fingerprints, which tie an artifact to its model: architecture sizes and a hash of key/value projections."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Names of the weights that compute keys and values in transformers' models.
_KEY_VALUE_WEIGHTS = re.compile(r"\.(k_proj|v_proj|qkv_proj|kv_proj|k_norm|query_key_value|Wqkv|c_attn)\.")


@dataclass(frozen=True)
class Fingerprint:
    """Equal fingerprints mean equal architectures and equal key and value weights. weights: their sha256."""

    model_type: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    weights: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"{self.model_type}, {self.layers} layers, {self.kv_heads} kv heads of {self.head_dim}, "
            f"weights {self.weights[:8]}"
        )


def fingerprint(model: PreTrainedModel) -> Fingerprint:
    """The fingerprint of a transformers causal language model.

    Weights are hashed as bfloat16, so that the fingerprint of a 16-bit checkpoint depends neither on the dtype it is
    loaded in nor on the device.
    """
    weights = sorted((name, weight) for name, weight in model.named_parameters() if is_hashed(name))
    return Fingerprint(**architecture(model.config), weights=hash_weights(weights))


def architecture(config: PretrainedConfig) -> dict[str, Any]:
    """The values of a model's fingerprint but `weights`, from its configuration."""
    config = config.get_text_config()
    heads = config.num_attention_heads
    return {
        "model_type": config.model_type,
        "layers": config.num_hidden_layers,
        "query_heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_size": config.hidden_size,
    }


def is_hashed(name: str) -> bool:
    """Whether the weight is part of a fingerprint."""
    return _KEY_VALUE_WEIGHTS.search(name) is not None


def hash_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The sha256 of named key and value weights, in this order."""
    digest = hashlib.sha256()
    for name, weight in weights:
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        exact = weight.detach().to("cpu", torch.bfloat16 if weight.is_floating_point() else weight.dtype)
        digest.update(exact.contiguous().view(torch.uint8).flatten().numpy().data)
    return digest.hexdigest()

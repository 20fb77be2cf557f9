"""Tell models apart: by the fingerprint of key and value weights, to which artifacts belong, and by the digest of all
weights, to which results belong."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli.artifact.adapters import applied_adapters, applied_weights
from kvq_cli.layer_kinds import attention_layers
from kvq_cli.lazy import torch
from kvq_cli.offload import stored_weight

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

#: Entries of a configuration that do not change what a model computes; nor do those that begin with "_".
_NOT_HASHED = frozenset({"architectures", "dtype", "torch_dtype", "transformers_version"})
#: Integers of as many bytes, as which weights of any dtype are added exactly, in any order.
_INTEGERS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}
#: Names of the weights that compute keys and values in transformers' models.
_KEY_VALUE_WEIGHTS = re.compile(r"\.(k_proj|v_proj|qkv_proj|kv_proj|k_norm|query_key_value|Wqkv|c_attn)\.")
#: Where a Python object is in memory, in its text: another in each process.
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass(frozen=True)
class Fingerprint:
    """Equal fingerprints mean equal architectures and equal key and value weights.

    weights: their sha256. attention: see `ModelShape`.
    """

    model_type: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    weights: str
    attention: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "attention", tuple(self.attention))  # JSON has lists

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        attention = {"attention": list(self.attention)} if self.attention else {}
        return {name: value for name, value in asdict(self).items() if name != "attention"} | attention

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
    stored = ((name, stored_weight(model, name, weight)) for name, weight in model.named_parameters())
    weights = sorted((name, weight) for name, weight in applied_weights(model, stored) if is_hashed(name))
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
        "attention": attention_layers(config),
    }


def is_hashed(name: str) -> bool:
    """Whether the weight is part of a fingerprint."""
    return _KEY_VALUE_WEIGHTS.search(name) is not None


def hash_weights(weights: Iterable[tuple[str, torch.Tensor]]) -> str:
    """The sha256 of named key and value weights, in this order."""
    digest = hashlib.sha256()
    for name, weight in plain_tensors(weights):
        digest.update(f"{name} {tuple(weight.shape)}\n".encode())
        exact = weight.detach().to("cpu", torch.bfloat16 if weight.is_floating_point() else weight.dtype)
        digest.update(exact.contiguous().view(torch.uint8).flatten().numpy().data)
    return digest.hexdigest()


def plain_tensors(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Named weights, each quantized one (a tensor subclass, as of quanto and torchao) as the tensors that it holds.

    Its other fields are added to their names, without addresses of Python objects.
    """
    for name, weight in weights:
        if torch.utils._python_dispatch.is_traceable_wrapper_subclass(weight):
            held, context = weight.__tensor_flatten__()  # type: ignore[attr-defined]
            form = f"{type(weight).__name__} {tuple(weight.shape)} {_ADDRESS.sub('', repr(context))}"
            yield from plain_tensors((f"{name}.{part} {form}", getattr(weight, part)) for part in held)
        else:
            yield name, weight


def weights_digest(model: PreTrainedModel) -> str:
    """Hash a model's configuration, the Python files that came with it (`--trust-remote-code`), and the sums over rows
    and over columns of the bits of all its weights, by sha256.

    Results, captured activations and saved caches depend on all weights; a fingerprint is that of keys and values
    alone. The sums are exact, and computed where the weights are: hashing them all would copy a model from its GPU.
    """
    config = {key: value for key, value in model.config.to_dict().items() if key not in _NOT_HASHED and key[0] != "_"}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
    for file in _own_code(model):
        digest.update(f"{file.name}\n".encode() + file.read_bytes())
    if applied := applied_adapters(model):
        named = [(name, tuple(each[:2] for each in adapters)) for name, adapters in sorted(applied.items())]
        digest.update(repr(named).encode())  # their weights are hashed below
    stored = ((name, stored_weight(model, name, weight)) for name, weight in model.state_dict().items())
    for name, weight in plain_tensors(sorted(applied_weights(model, stored))):
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype}\n".encode())
        bits = weight.detach().view(getattr(torch, _INTEGERS[weight.element_size()]))
        bits = bits.flatten(1) if bits.ndim > 1 else bits.reshape(1, -1)
        for axis in (0, 1):
            digest.update(bits.sum(axis, dtype=torch.int64).cpu().numpy().data)
    return digest.hexdigest()


def _own_code(model: PreTrainedModel) -> list[Path]:
    """The Python files of a model that is no part of transformers, from its folder in transformers' cache."""
    module = type(model).__module__
    if not module.startswith("transformers_modules."):
        return []
    return sorted(Path(str(sys.modules[module].__file__)).parent.glob("*.py"))

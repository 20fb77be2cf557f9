"""Artifacts and token ids of random numbers, for benchmarks of time and memory without calibration or text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvq_cli.artifact import Artifact, fingerprint
from kvq_cli.benchmarking.accounting import artifact_specs
from kvq_cli.codecs.layout import TensorSpec
from kvq_cli.methods.base import Method, ModelShape
from kvq_cli.methods.registry import to_config
from kvq_cli.models import LoadedModel, model_shape, vocabulary

#: A typical ratio for English text.
_CHARACTERS_PER_TOKEN = 4
_TRANSFORMS = ("analysis", "synthesis")


def random_artifact(method: Method, model: PreTrainedModel, name: str, seed: int) -> Artifact:
    """Return an artifact of the method for this model with random numbers drawn with `seed`, in the right shapes.

    Standard deviations are 1, means 0; every head of a hybrid uses the first candidate shape.
    """
    generator = torch.Generator().manual_seed(seed)
    shape, tensors = model_shape(model), {}
    for layer in shape.cached_layers:
        for tensor_name, x in artifact_tensors(method, shape, layer).items():
            kind = tensor_name.split(".")[1]
            if kind in ("std", "deviation", "spread"):
                x.fill_(1)
            elif kind != "mean" and x.is_floating_point():
                # keeps the variance of projections
                rows = x.shape[0] if kind in ("up", "down", "basis") else x.shape[2] if kind in _TRANSFORMS else 1
                x = (torch.randn(x.shape, generator=generator, dtype=torch.float32) / rows**0.5).to(x.dtype)
            tensors[f"layers.{layer}.{tensor_name}"] = x
    identity = {"name": name, "fingerprint": fingerprint(model).to_dict()}
    config = {"method": to_config(method), "model": identity, "checksum": f"random numbers of seed {seed}"}
    return Artifact(config, tensors, Path(f"random artifact of {method.name}"))


def artifact_tensors(method: Method, shape: ModelShape, layer: int) -> dict[str, Tensor]:
    """The tensors that `artifact_specs` stands for: zeros, and its choices."""
    return {name: _tensor(spec) for name, spec in artifact_specs(method, shape, layer).items()}


def _tensor(spec: TensorSpec) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    return torch.zeros(spec.shape, dtype=dtype) if spec.values is None else torch.tensor(spec.values, dtype=dtype)


class RandomTokens:
    """A tokenizer that ignores the text: random token ids, one per `_CHARACTERS_PER_TOKEN` characters."""

    bos_token_id = eos_token_id = None

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._vocabulary, self._seed = vocabulary, seed

    def __len__(self) -> int:
        return self._vocabulary

    def __call__(self, text: str, **_: object) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(self._seed)
        ids = torch.randint(self._vocabulary, (1, -(-len(text) // _CHARACTERS_PER_TOKEN)), generator=generator)
        return SimpleNamespace(input_ids=ids)


def as_loaded_model(model: PreTrainedModel, name: str, seed: int) -> LoadedModel:
    """Wrap a model with random weights as calibration takes it, with `RandomTokens` as its tokenizer."""
    random_tokens = RandomTokens(vocabulary(model), seed)
    # A cast: it has the only methods of a tokenizer that calibration calls.
    tokenizer = cast(PreTrainedTokenizerBase, random_tokens)
    return LoadedModel(model, tokenizer, name, None, model_shape(model))

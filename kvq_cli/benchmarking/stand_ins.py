"""What stands in for what was never trained, where only time and memory count: artifacts and text of random numbers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
from transformers import PreTrainedModel

from kvq_cli.artifact import Artifact, fingerprint
from kvq_cli.benchmarking.accounting import artifact_tensors
from kvq_cli.methods.base import Method
from kvq_cli.methods.registry import to_config
from kvq_cli.models import LoadedModel, model_shape

#: Of text, roughly.
_CHARACTERS_PER_TOKEN = 4


def random_artifact(method: Method, model: PreTrainedModel, name: str, seed: int) -> Artifact:
    """An artifact of the method for this model, of the right shapes and bytes, whose numbers are drawn from `seed`.

    Standard deviations are 1, means 0; of candidate shapes every head has the first.
    """
    generator = torch.Generator().manual_seed(seed)
    shape, tensors = model_shape(model), {}
    for layer in range(shape.layers):
        for own, like in artifact_tensors(method, shape, layer).items():
            x = torch.zeros(like.shape, dtype=like.dtype)
            kind = own.split(".")[1]
            if kind == "std":
                x.fill_(1)
            elif kind != "mean" and like.dtype.is_floating_point:
                rows = like.shape[0] if kind in ("up", "down") else 1  # so that products keep their size
                x = (torch.randn(like.shape, generator=generator) / rows**0.5).to(like.dtype)
            tensors[f"layers.{layer}.{own}"] = x
    about = {"name": name, "fingerprint": fingerprint(model).to_dict()}
    config = {"method": to_config(method), "model": about, "checksum": f"random numbers of seed {seed}"}
    return Artifact(config, tensors, Path(f"random artifact of {method.name}"))


class RandomTokens:
    """Takes the place of a tokenizer: a random token for every few characters."""

    bos_token_id = eos_token_id = None

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._vocabulary, self._seed = vocabulary, seed

    def __len__(self) -> int:
        return self._vocabulary

    def __call__(self, text: str, **_: object) -> SimpleNamespace:
        generator = torch.Generator().manual_seed(self._seed)
        ids = torch.randint(self._vocabulary, (1, -(-len(text) // _CHARACTERS_PER_TOKEN)), generator=generator)
        return SimpleNamespace(input_ids=ids)


def as_loaded(model: PreTrainedModel, name: str, seed: int) -> LoadedModel:
    """A model of random weights in the form in which calibration takes one."""
    vocabulary = model.config.get_text_config().vocab_size
    return LoadedModel(model, RandomTokens(vocabulary, seed), name, None, model_shape(model))

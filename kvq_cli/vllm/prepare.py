"""Read what `kvq serve` needs of a model without loading it, and plan the server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvq_cli import packaged
from kvq_cli.artifact import Artifact
from kvq_cli.artifact.fingerprint import Fingerprint, architecture, hash_weights, is_hashed
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import Method
from kvq_cli.models import configured_shape, model_config, model_source
from kvq_cli.vllm.checks import check_flags
from kvq_cli.vllm.command import ServePlan, serve_plan
from kvq_cli.vllm.drafts import check_drafts, method_of_flags
from kvq_cli.vllm.prefix_store.settings import StoreSettings
from kvq_cli.vllm.served import ServedMethod

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def prepare(
    attachable: Method | Artifact,
    model: str,
    dtype: str,
    trust_remote_code: bool,
    flags: Sequence[str],
    store: StoreSettings | None = None,
) -> ServePlan:
    """The plan of a server of `model`. Raises UsageError where the method, its artifact, the model or vLLM's flags do
    not fit each other."""
    check_flags(flags, artifact=isinstance(attachable, Artifact))  # before the artifact is compared with the model
    if (drafts := method_of_flags(flags)) is not None:
        check_drafts(drafts, stores=store is not None)
    packaged.check_dtype(model, dtype)
    config = model_config(model, trust_remote_code)
    shape = configured_shape(model, trust_remote_code=trust_remote_code)
    if dtype != "auto":
        shape = replace(shape, dtype=dtype)
    source = model_source(model, dtype=dtype)
    if isinstance(attachable, Artifact):
        attachable.check_config(config, model)
        check_weights(attachable, config, source, model, trust_remote_code)
    return serve_plan(ServedMethod.of(attachable), config, shape, source, model, flags, store)


def belongs_to(artifact: Artifact, model: str, trust_remote_code: bool) -> bool:
    """Whether the artifact was calibrated for this model, as far as `check_weights` can tell."""
    config = model_config(model, trust_remote_code)
    try:
        artifact.check_config(config, model)
        check_weights(artifact, config, model_source(model), model, trust_remote_code)
    except UsageError:
        return False
    return True


def check_weights(
    artifact: Artifact,
    config: PretrainedConfig,
    source: str,
    name: str,
    trust_remote_code: bool,
    revision: str | None = None,
) -> None:
    """Raise UsageError if the model's key and value weights are not those of the artifact's model.

    Reads these weights alone, from the model's folder or the Hub's cache. Where they cannot be read (vLLM downloads the
    model later, or its files name the weights unlike transformers does), the model must have the artifact's name.

    revision: of the Hub.
    """
    weights = dict(_stored_weights(weights_folder(source, revision)))
    actual = Fingerprint(**architecture(config), weights=hash_weights(sorted(weights.items())))
    if actual == artifact.fingerprint:
        return
    if not weights or any(key not in weights for key in _expected_names(config, trust_remote_code)):
        if name != artifact.model_name:
            raise UsageError(
                f"artifact {artifact.path} was calibrated for {artifact.model_name!r}, and the key and value weights "
                f"of {name!r} cannot be read to compare them: pass --model {artifact.model_name}, or a folder with "
                "the model's safetensors files"
            )
        return
    raise UsageError(
        f"artifact {artifact.path} belongs to the model {artifact.model_name!r} ({artifact.fingerprint}), not to "
        f"{name!r} ({actual}): pass --model {artifact.model_name} or calibrate for {name!r}"
    )


def weights_folder(source: str, revision: str | None) -> Path:
    """The model's folder: `source`, or where the Hub's cache has this revision of it."""
    from huggingface_hub import snapshot_download

    if Path(source).is_dir():
        return Path(source)
    try:
        return Path(snapshot_download(source, revision=revision, local_files_only=True))
    except (OSError, ValueError):  # not downloaded yet, or no name of the Hub
        return Path(source)


def _stored_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The key and value weights in the folder's safetensors files."""
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else ():
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118 (not a mapping)
                if is_hashed(key):
                    yield key, tensors.get_tensor(key)


def _expected_names(config: PretrainedConfig, trust_remote_code: bool) -> list[str]:
    """The names of transformers' key and value weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return [name for name, _ in model.named_parameters() if is_hashed(name)]

"""Complete artifacts of random numbers: what calibration writes, without its minutes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from random_joined import random_joined
from random_transforms import random_stream, random_tensors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from kvq_cli.artifact import fingerprint
from kvq_cli.artifact.contents import tensor_sizes
from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.calibration.factors import factorize
from kvq_cli.calibration.settings import CalibrationSettings
from kvq_cli.methods.base import Method, ModelShape
from kvq_cli.methods.joined_spec import JoinedSpec
from kvq_cli.methods.mixed import Mixed
from kvq_cli.methods.registry import to_config
from kvq_cli.methods.rotation_spec import rotated_streams
from kvq_cli.methods.specs import CalibrationSpec, CodebookSpec, FactorSpec, Spec, Uncalibrated
from kvq_cli.methods.transform_specs import TransformSpec
from kvq_cli.models import model_shape
from kvq_cli.tuning.settings import TuneOptions

TEXT = {"dataset": "prose", "samples": 6, "seqlen": 100, "seed": 0}
CAPTURED = {"tokens": 9, "tokens_with_gradients": 9, "tokens_held_out": 3}
SETTINGS = CalibrationSettings("prose", 6, 100, 4, 300, 5, 0.1, 4.0, 0, "kvq")


def tiny_model(seed: int = 0, **options: Any) -> LlamaForCausalLM:
    """A random Llama of 2 layers, 2 kv heads, head_dim 8, whose keys and values are as large as its layer input."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, **heads, **options})).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.normal_(std=1.5 * weight.shape[1] ** -0.5)
    return model


def random_parts(
    method: Method, model: PreTrainedModel, name: str = "mine", seed: int = 0
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors for `save_artifact`. Heads take turns among the block shapes that `hybrid` allows them."""
    shape = model_shape(model)
    spec, tensors = method.calibration(shape), {}
    generator = torch.Generator().manual_seed(seed)
    for layer in shape.cached_layers:
        drawn = _factors(spec, model, layer) or _layer(spec, shape, layer, generator)
        tensors |= {f"layers.{layer}.{key}": tensor for key, tensor in drawn.items()}
    model_entry = {"name": name, "revision": None, "dtype": shape.dtype}
    tuning = {"tuning": _tuning(method)} if isinstance(method, Mixed) else {}
    config = {
        "kvq": "0.0",
        "method": to_config(method),
        "model": {**model_entry, "fingerprint": fingerprint(model).to_dict()},
        "calibration": SETTINGS.to_dict() if spec.captures else TEXT if spec.reads_text else {},
        "versions": {"torch": "0", "transformers": "0"},
        "sizes": tensor_sizes(tensors),
        **({"captured": CAPTURED} if spec.captures else {}),
        "errors": {
            "measure": "none",
            "layers": [_errors(spec, shape, layer, tensors) for layer in shape.cached_layers],
        },
        **tuning,
    }
    return config, tensors


def _tuning(method: Mixed) -> dict[str, Any]:
    """The record of a search that tried two configurations."""
    tried = {"step": "start", "bits": 2.0, "kl": 0.1, "keys": "klt-2bit", "values": "klt-2bit"}
    chosen = {"step": "choice 1", "bits": 2.0, "kl": 0.05, "keys": method.keys, "values": method.values}
    return {
        **TuneOptions(budget=4.0).to_dict(),
        "chosen": 1,
        "tried": [tried, chosen],
        "predicted": [{"bits": 2.0, "kl": 0.06}],
        "alone": [[{"rate": 3, "kl": 0.01}]],
    }


def _choice(spec: CalibrationSpec, stream: CodebookSpec, shape: ModelShape) -> list[int]:
    return [head % len(stream.shapes) if spec.hybrid == "head" else 0 for head in range(shape.kv_heads)]


def _factors(spec: Spec, model: PreTrainedModel, layer: int) -> dict[str, Tensor]:
    """Those of the model's weights where they have full rank: others are refused."""
    if type(spec) is not FactorSpec or not spec.factors(layer):
        return {}
    return factorize(attention_layers(model)[layer], spec.factors(layer), model.dtype)[0]


def _layer(spec: Spec, shape: ModelShape, layer: int, generator: torch.Generator) -> dict[str, Tensor]:
    if not spec.captures:
        tensors = random_tensors(spec.layout(shape, layer, {}), generator)
        for kind in rotated_streams(spec):
            tensors |= _orthogonal(tensors, kind)
        return tensors
    tensors = {}
    for kind, one in spec.parts(layer).items():
        if isinstance(one, TransformSpec):
            tensors |= random_stream(one, kind, shape, generator)
        elif isinstance(one, JoinedSpec):
            tensors |= random_joined(one, kind, shape, layer)
        elif isinstance(one, CalibrationSpec):
            tensors |= _codebooks(one, kind, shape, generator)
    return tensors


def _codebooks(spec: CalibrationSpec, kind: str, shape: ModelShape, generator: torch.Generator) -> dict[str, Tensor]:
    stream = spec.stream(kind)
    choice = _choice(spec, stream, shape)
    layout = stream.layout(shape, choice)
    tensors = random_tensors(layout, generator)
    tensors["choice"] = torch.tensor(choice, dtype=torch.int8)
    if "std" in tensors:
        tensors["std"] = tensors["std"].abs() + 0.5
    if "rotation" in tensors:
        tensors |= _orthogonal(tensors)
    if "lower" in tensors:
        lower, upper = -tensors["lower"].abs() - 1, tensors["upper"].abs() + 1
        tensors |= {"lower": lower, "upper": upper}
        if stream.by_range:
            tensors |= {"mean": (lower + upper) / 2, "std": (upper - lower) / 2}
    return {f"{kind}.{name}": tensor for name, tensor in tensors.items()}


def _orthogonal(tensors: Mapping[str, Tensor], kind: str = "") -> dict[str, Tensor]:
    """An orthogonal rotation, and a spread above 0, in place of random ones."""
    rotation, spread = (f"{kind}.{name}".lstrip(".") for name in ("rotation", "spread"))
    return {rotation: torch.linalg.qr(tensors[rotation]).Q.contiguous(), spread: tensors[spread].abs() + 0.5}


def _errors(spec: Spec, shape: ModelShape, layer: int, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    if not spec.captures:
        ranks = {name: tensors[f"layers.{layer}.{name}.down"].shape[1] for name in spec.factors(layer)}
        ranks |= dict.fromkeys(rotated_streams(spec), shape.head_dim)
        return {name: {"rank": rank, "residual": 0.01, "energy": 0.5} for name, rank in ranks.items()}
    entry: dict[str, Any] = {"fisher": 0.25, "plain": 0.25, "fisher_per_head": [0.25] * shape.kv_heads}
    errors = {}
    for kind, one in spec.parts(layer).items():
        if isinstance(one, Uncalibrated):
            errors[kind] = {"chosen": {**entry, "loss": 0.25}}
        elif isinstance(one, TransformSpec):
            nbytes = one.first_choice(kind, shape).nbytes
            errors[kind] = {"bytes": nbytes, "effective_tokens": 9.5, "chosen": {**entry, "loss": 0.25}}
        elif isinstance(one, JoinedSpec):
            nbytes = 4 * sum(group.words for group in one.first_choice(kind, shape))
            errors[kind] = {"bytes": nbytes, "effective_tokens": 9.5, "chosen": {**entry, "loss": 0.25}}
        else:
            stream = one.stream(kind)
            errors[kind] = {
                "choice": [stream.shapes[index].name for index in _choice(one, stream, shape)],
                "chosen": entry,
                "shapes": {block.name: entry for block in stream.shapes},
                "adjacent_token_correlation": 0.5,
            }
    return errors

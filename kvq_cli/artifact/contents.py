"""Check an artifact's options, tensors and errors against what its method would have written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kvq_cli.artifact.schema import CALIBRATION, Form, Many, OneOf, Whole, check_form
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.base import CalibrationSpec, CodebookSpec, FactorSpec, Method, ModelShape
from kvq_cli.methods.registry import from_config, to_config
from kvq_cli.methods.tensors import layer_layout


def check_contents(config: Mapping[str, Any], tensors: Mapping[str, Tensor], where: Path) -> None:
    """Raise KvqError for options, tensors or errors that the method cannot have written for the config's model.

    config: has the form `schema.CONFIG`. where: the artifact's `config.json`, for messages.
    """
    shape = _model_shape(config["model"])
    with _refused(where):
        check_form(config["method"].get("name"), str, "method.name")
        method = from_config(config["method"])
        _check_options(config["method"], method)
        # A list that was read bounds the number of layers, for which specs hold an entry each.
        check_form(config["errors"]["layers"], Many(dict, shape.layers), "errors.layers")
        spec = method.calibration(shape)
        codebooks = isinstance(spec, CalibrationSpec)
        check_form(config["calibration"], CALIBRATION if codebooks else {}, "calibration")
        if codebooks != ("captured" in config):
            raise KvqError(f"captured must be {'given' if codebooks else 'absent'} for {method.name}")
    for layer, found in enumerate(_by_layer(tensors, shape.layers, where.parent)):
        with _refused(where.parent):
            choices = _check_layer(found, spec, shape, layer)
        with _refused(where):
            form = _error_form(spec, shape, layer, choices, found)
            check_form(config["errors"]["layers"][layer], form, f"errors.layers[{layer}]")
    if config["sizes"] != tensor_sizes(tensors):
        raise KvqError(f"{where}: sizes are not those of the tensors: calibrate again")


def _check_layer(
    tensors: Mapping[str, Tensor], spec: CalibrationSpec | FactorSpec, shape: ModelShape, layer: int
) -> dict[str, list[int]]:
    """Check names, shapes, dtypes and ranges of a layer's tensors; returns the block shapes of the kv heads by stream,
    for codebooks."""
    prefix = f"layers.{layer}."
    if isinstance(spec, FactorSpec):
        _check_layout(tensors, layer_layout(spec, shape, layer, {}), prefix)
        return {}
    streams = {"k": spec.keys, "v": spec.values}
    choices = {kind: _choice(tensors, kind, one, spec.hybrid, shape, prefix) for kind, one in streams.items()}
    _check_layout(tensors, layer_layout(spec, shape, layer, choices), prefix)
    for kind, one in streams.items():
        _check_statistics(tensors, kind, one, prefix)
    return choices


def tensor_sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Bytes per kind of tensor ("k.centroids", "v.mean", ...) and in total."""
    sizes: dict[str, int] = {}
    for name in sorted(tensors):
        _, _, stream, tensor = name.split(".")[:4]
        kind = f"{stream}.{tensor}"
        sizes[kind] = sizes.get(kind, 0) + tensors[name].numel() * tensors[name].element_size()
    return sizes | {"total": sum(sizes.values())}


@contextmanager
def _refused(where: Path) -> Iterator[None]:
    """Name the file, and what to do, in the errors of a check. A UsageError would blame the command line."""
    try:
        yield
    except KvqError as error:
        raise KvqError(f"{where}: {error}" + ("" if isinstance(error, UsageError) else ": calibrate again")) from error


def _model_shape(model: Mapping[str, Any]) -> ModelShape:
    sizes = {key: model["fingerprint"][key] for key in ("layers", "query_heads", "kv_heads", "head_dim", "hidden_size")}
    return ModelShape(**sizes, dtype=getattr(torch, model["dtype"]))


def _check_options(options: Mapping[str, Any], method: Method) -> None:
    """Options must have the type that calibration writes: flags and strings are converted, files are not."""
    parsed = to_config(method)
    for key, value in options.items():
        if type(value) is not type(parsed[key]) or value != parsed[key]:
            raise KvqError(f"method.{key} must be {parsed[key]!r}, as it is written by calibration")


def _by_layer(tensors: Mapping[str, Tensor], layers: int, where: Path) -> list[dict[str, Tensor]]:
    """The tensors of each layer by their names without `layers.<i>.`."""
    found: list[dict[str, Tensor]] = [{} for _ in range(layers)]
    indices = {str(index): index for index in range(layers)}
    for full, tensor in sorted(tensors.items()):  # so that equal artifacts give equal messages
        head, _, rest = full.partition(".")
        layer, _, name = rest.partition(".")
        if head != "layers" or layer not in indices or not name:
            raise KvqError(f"{where}: unknown tensor {full[:80]!r} for a model of {layers} layers: calibrate again")
        found[indices[layer]][name] = tensor
    return found


def _choice(
    tensors: Mapping[str, Tensor], kind: str, spec: CodebookSpec, hybrid: str, shape: ModelShape, prefix: str
) -> list[int]:
    """The index of each kv head's block shape."""
    name = f"{kind}.choice"
    if name not in tensors:
        raise KvqError(f"tensor {prefix}{name} is missing")
    check_tensor(tensors[name], (shape.kv_heads,), torch.int8, prefix + name)
    choice = cast("list[int]", tensors[name].tolist())
    if min(choice) < 0 or max(choice) >= len(spec.shapes):
        raise KvqError(f"tensor {prefix}{name} must hold numbers from 0 to {len(spec.shapes) - 1}")
    if hybrid != "head" and len(set(choice)) > 1:
        raise KvqError(f"tensor {prefix}{name} must name one block shape for all heads with hybrid={hybrid}")
    if hybrid == "off" and any(choice):
        raise KvqError(f"tensor {prefix}{name} must be 0 with hybrid=off")
    return choice


def _check_layout(
    tensors: Mapping[str, Tensor], layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]], prefix: str
) -> None:
    for name in tensors:
        if name not in layout:
            raise KvqError(f"the method's options do not allow a tensor {prefix}{name[:80]}")
    for name, (size, dtype) in layout.items():
        if name not in tensors:
            raise KvqError(f"tensor {prefix}{name} is missing")
        check_tensor(tensors[name], size, dtype, prefix + name)


def check_tensor(tensor: Tensor, size: tuple[int, ...], dtype: torch.dtype, name: str) -> None:
    """Raise KvqError, naming the tensor, for another shape or dtype, or numbers that are not finite."""
    if tuple(tensor.shape) != size or tensor.dtype != dtype:
        actual, valid = (
            f"{list(s)} {str(d).removeprefix('torch.')}" for s, d in ((tensor.shape, tensor.dtype), (size, dtype))
        )
        raise KvqError(f"tensor {name} is {actual} instead of {valid}")
    if dtype.is_floating_point and not tensor.isfinite().all():
        raise KvqError(f"tensor {name} has infinite numbers or NaN")


def _check_statistics(tensors: Mapping[str, Tensor], kind: str, spec: CodebookSpec, prefix: str) -> None:
    named = {name: tensors.get(f"{kind}.{name}") for name in ("mean", "std", "lower", "upper")}
    mean, std, lower, upper = named.values()
    if std is not None and (std < 0).any():
        raise KvqError(f"tensor {prefix}{kind}.std has negative numbers")
    if lower is None or upper is None:
        return
    if (lower > upper).any():
        raise KvqError(f"tensor {prefix}{kind}.lower exceeds {prefix}{kind}.upper")
    if mean is not None and std is not None and spec.by_range:
        for name, actual, valid in (("mean", mean, (lower + upper) / 2), ("std", std, (upper - lower) / 2)):
            if not torch.allclose(actual, valid, rtol=1e-5, atol=1e-6 * float(valid.abs().max())):
                raise KvqError(f"tensor {prefix}{kind}.{name} is not computed from {kind}.lower and {kind}.upper")


def _error_form(
    spec: CalibrationSpec | FactorSpec,
    shape: ModelShape,
    layer: int,
    choices: Mapping[str, list[int]],
    tensors: Mapping[str, Tensor],
) -> Form:
    """The form of a layer's entry in `errors.layers`; block shapes and ranks are those of the tensors."""
    if isinstance(spec, FactorSpec):
        ranks = {name: tensors[f"{name}.down"].shape[1] for name in spec.layers[layer]}
        return {name: {"rank": Whole(rank, rank), "residual": float, "energy": float} for name, rank in ranks.items()}
    entry: Form = {"fisher": float, "plain": float, "fisher_per_head": Many(float, shape.kv_heads)}
    return {
        kind: {
            "choice": OneOf(([stream.shapes[index].name for index in choices[kind]],)),
            "chosen": entry,
            "shapes": {block.name: entry for block in stream.shapes},
            "adjacent_token_correlation": float,
        }
        for kind, stream in (("k", spec.keys), ("v", spec.values))
    }

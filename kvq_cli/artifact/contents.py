"""Check an artifact's options, tensors and errors against what its method would have written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvq_cli.artifact.schema import CALIBRATION, TEXT, TUNING, Form, Many, OneOf, Whole, check_form
from kvq_cli.codecs.chunk_codebooks import CHUNKS
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.lazy import torch
from kvq_cli.methods.base import (
    AnySpec,
    CodebookSpec,
    FactorSpec,
    Method,
    MixedSpec,
    ModelShape,
    TransformSpec,
    reads_text,
    stream_spec,
)
from kvq_cli.methods.mixed import Mixed
from kvq_cli.methods.registry import from_config, to_config
from kvq_cli.methods.tensors import code_budget, kept_components, layer_layout, stream_codes

if TYPE_CHECKING:
    from torch import Tensor

#: The synthesis of stored transforms undoes their analysis to this much: they are rounded to 32 bits.
_INVERSE_TOLERANCE = 1e-3


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
        clusters = not isinstance(spec, FactorSpec)
        form = CALIBRATION if clusters else TEXT if reads_text(spec) else {}
        check_form(config["calibration"], form, "calibration")
        if clusters != ("captured" in config):
            raise KvqError(f"captured must be {'given' if clusters else 'absent'} for {method.name}")
        if "tuning" in config:
            _check_tuning(config["tuning"], method)
    allocations: list[list[int]] = []
    for layer, found in enumerate(_by_layer(tensors, shape.layers, where.parent)):
        with _refused(where.parent):
            choices = _check_layer(found, spec, shape, layer)
        with _refused(where):
            form = _error_form(spec, shape, layer, choices, found)
            check_form(config["errors"]["layers"][layer], form, f"errors.layers[{layer}]")
        allocations += [row for rows in choices.values() for row in rows]
    if isinstance(spec, TransformSpec):
        with _refused(where.parent):
            _check_codes(allocations, code_budget(spec, shape), "the layers have")
    if config["sizes"] != tensor_sizes(tensors):
        raise KvqError(f"{where}: sizes are not those of the tensors: calibrate again")


def _check_tuning(tuning: Any, method: Method) -> None:
    """The record of a search belongs to a mixed method, which is the one that it chose."""
    if not isinstance(method, Mixed):
        raise KvqError(f"tuning must be absent for {method.name}")
    check_form(tuning, TUNING, "tuning")
    if tuning["chosen"] >= len(tuning["tried"]):
        raise KvqError(f"tuning.chosen must be below {len(tuning['tried'])}, the number of those tried")
    chosen = tuning["tried"][tuning["chosen"]]
    if (chosen["keys"], chosen["values"]) != (method.keys, method.values):
        raise KvqError("tuning.chosen is not the method of the artifact")


def _check_layer(tensors: Mapping[str, Tensor], spec: AnySpec, shape: ModelShape, layer: int) -> dict[str, list[Any]]:
    """Check names, shapes, dtypes and ranges of a layer's tensors; returns by stream, for codebooks, the block shapes
    of the kv heads, for transforms the allocation of each group."""
    prefix = f"layers.{layer}."
    if isinstance(spec, FactorSpec):
        _check_layout(tensors, layer_layout(spec, shape, layer, {}), prefix)
        return {}
    streams = {kind: stream_spec(spec, layer, kind) for kind in "kv"}
    choices: dict[str, list[Any]] = {}
    for kind, one in streams.items():
        if isinstance(one, TransformSpec):
            choices[kind] = _allocation(tensors, kind, one, shape, prefix)
        elif one is not None:
            choices[kind] = _choice(tensors, kind, one.stream(kind), one.hybrid, shape, prefix)
    _check_layout(tensors, layer_layout(spec, shape, layer, choices), prefix)
    for kind, one in streams.items():
        if isinstance(one, TransformSpec):
            _check_transform(tensors, kind, choices[kind], prefix)
            if isinstance(spec, MixedSpec):
                _check_codes(choices[kind], stream_codes(one, kind, shape), f"{prefix}{kind}.allocation gives")
        elif one is not None:
            _check_statistics(tensors, kind, one.stream(kind), prefix)
    return choices


def _check_codes(rows: list[list[int]], most: int, what: str) -> None:
    if (codes := sum(map(sum, rows))) > most:
        raise KvqError(f"{what} {codes} codes, above the {most} of the method")


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


def _allocation(
    tensors: Mapping[str, Tensor], kind: str, spec: TransformSpec, shape: ModelShape, prefix: str
) -> list[list[int]]:
    """For each group, how many chunks have 1, 2, 4 and 8 components."""
    name = f"{kind}.allocation"
    groups, width = spec.groups(kind, shape)
    if name not in tensors:
        raise KvqError(f"tensor {prefix}{name} is missing")
    check_tensor(tensors[name], (groups, len(CHUNKS)), torch.int16, prefix + name)
    rows = cast("list[list[int]]", tensors[name].tolist())
    for row in rows:
        if min(row) < 0 or not 1 <= kept_components(row) <= width:
            raise KvqError(f"tensor {prefix}{name} must give out from 1 to {width} components, not as {row}")
    return rows


def _check_transform(tensors: Mapping[str, Tensor], kind: str, allocation: list[list[int]], prefix: str) -> None:
    """The synthesis of the kept components undoes their analysis; there are no others."""
    if (tensors[f"{kind}.std"] < 0).any():
        raise KvqError(f"tensor {prefix}{kind}.std has negative numbers")
    analysis, synthesis = (tensors[f"{kind}.{name}"].double() for name in ("analysis", "synthesis"))
    for group, row in enumerate(allocation):
        kept = kept_components(row)
        unused = analysis[group, kept:].any() or synthesis[group, :, kept:].any()
        undone = analysis[group, :kept] @ synthesis[group, :, :kept]
        identity = torch.eye(kept, dtype=torch.float64)
        if unused or not torch.allclose(undone, identity, rtol=0, atol=_INVERSE_TOLERANCE):
            raise KvqError(f"tensor {prefix}{kind}.synthesis does not undo {prefix}{kind}.analysis")


def _check_layout(
    tensors: Mapping[str, Tensor], layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]], prefix: str
) -> None:
    for name in tensors:
        if name not in layout:
            raise KvqError(f"the method's options do not allow a tensor {prefix + name[:80]!r}")
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


def _check_rotation(rotation: Tensor, spread: Tensor, where: str) -> None:
    product = rotation.double() @ rotation.double().mT
    if not torch.allclose(
        product, torch.eye(rotation.shape[1]).double().expand_as(product), rtol=0, atol=_INVERSE_TOLERANCE
    ):
        raise KvqError(f"tensor {where}.rotation is not orthogonal")
    if (spread < 0).any():
        raise KvqError(f"tensor {where}.spread has negative numbers")


def _check_statistics(tensors: Mapping[str, Tensor], kind: str, spec: CodebookSpec, prefix: str) -> None:
    if spec.rotation == "opq":
        _check_rotation(tensors[f"{kind}.rotation"], tensors[f"{kind}.spread"], prefix + kind)
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
    spec: AnySpec,
    shape: ModelShape,
    layer: int,
    choices: Mapping[str, list[Any]],
    tensors: Mapping[str, Tensor],
) -> Form:
    """The form of a layer's entry in `errors.layers`; block shapes, codes and ranks are those of the tensors."""
    if isinstance(spec, FactorSpec):
        ranks = {name: tensors[f"{name}.down"].shape[1] for name in spec.layers[layer]}
        return {name: {"rank": Whole(rank, rank), "residual": float, "energy": float} for name, rank in ranks.items()}
    entry: dict[str, Form] = {"fisher": float, "plain": float, "fisher_per_head": Many(float, shape.kv_heads)}
    form: dict[str, Form] = {}
    for kind in "kv":
        one = stream_spec(spec, layer, kind)
        if one is None:
            form[kind] = {"chosen": {**entry, "loss": float}}
        elif isinstance(one, TransformSpec):
            codes = sum(map(sum, choices[kind]))
            form[kind] = {"codes": Whole(codes, codes), "chosen": {**entry, "loss": float}}
        else:
            shapes = one.stream(kind).shapes
            form[kind] = {
                "choice": OneOf(([shapes[index].name for index in choices[kind]],)),
                "chosen": entry,
                "shapes": {block.name: entry for block in shapes},
                "adjacent_token_correlation": float,
            }
    return form

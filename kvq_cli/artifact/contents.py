"""Check an artifact's options, tensors and errors against what its method would have written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from kvq_cli.artifact.schema import CALIBRATION, TEXT, TUNING, Form, Many, Whole, check_form
from kvq_cli.artifact.stored import StoredTensor, check_tensor
from kvq_cli.artifact.streams import STREAMS, TransformCheck, check_bytes, check_rotation
from kvq_cli.codecs.layout import TensorLike
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.base import Method, ModelShape
from kvq_cli.methods.mixed import Mixed
from kvq_cli.methods.registry import from_config
from kvq_cli.methods.rotation_spec import rotated_streams
from kvq_cli.methods.specs import Spec, Tensors


def check_contents(config: Mapping[str, Any], tensors: Mapping[str, StoredTensor], where: Path) -> None:
    """Raise KvqError for options, tensors or errors that the method cannot have written for the config's model.

    config: has the form `schema.CONFIG`. where: the artifact's `config.json`, for messages.
    """
    with _refused(where):
        shape = _model_shape(config["model"])
        check_form(config["method"].get("name"), str, "method.name")
        method = from_config(config["method"])
        _check_options(config["method"], method)
        # A list that was read bounds the number of layers, for which specs hold an entry each.
        check_form(config["errors"]["layers"], Many(dict, len(shape.cached_layers)), "errors.layers")
        spec = method.calibration(shape)
        form = CALIBRATION if spec.captures else TEXT if spec.reads_text else {}
        check_form(config["calibration"], form, "calibration")
        if spec.captures != ("captured" in config):
            raise KvqError(f"captured must be {'given' if spec.captures else 'absent'} for {method.name}")
        if "tuning" in config:
            _check_tuning(config["tuning"], method)
    nbytes = 0
    by_layer = _by_layer(tensors, shape, where.parent)
    for place, (layer, found) in enumerate(by_layer.items()):
        with _refused(where.parent):
            of_layer, form = _check_layer(found, spec, shape, layer)
        with _refused(where):
            check_form(config["errors"]["layers"][place], form, f"errors.layers[{place}]")
        nbytes += of_layer
    if (budget := spec.byte_budget(shape)) is not None:
        with _refused(where.parent):
            check_bytes(nbytes, budget, "the layers have")
    with _refused(where.parent):
        for name in spec.same_in_all_layers:
            first, *others = (found[name].numbers for found in by_layer.values())
            if not all(np.array_equal(first, each) for each in others):
                raise KvqError(f"tensors layers.*.{name} must be the same in all layers")
    if config["sizes"] != tensor_sizes({name: tensor.spec for name, tensor in tensors.items()}):
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


def _check_layer(tensors: Mapping[str, StoredTensor], spec: Spec, shape: ModelShape, layer: int) -> tuple[int, Form]:
    """Check names, shapes, dtypes and ranges of a layer's tensors; returns the bytes of a token packed by its
    transforms, and the form of the layer's entry in `errors.layers`."""
    prefix = f"layers.{layer}."
    streams = {
        kind: STREAMS[type(part)](part, kind, shape, tensors, prefix) for kind, part in spec.parts(layer).items()
    }
    choices = {kind: stream.choice() for kind, stream in streams.items()}
    _check_layout(tensors, spec.layout(shape, layer, choices), prefix)
    ranks = {name: tensors[f"{name}.down"].spec.shape[1] for name in spec.factors(layer)}
    for kind in rotated_streams(spec):
        check_rotation(kind, tensors, prefix)
        ranks[kind] = shape.head_dim
    form: dict[str, Form] = {
        name: {"rank": Whole(rank, rank), "residual": float, "energy": float} for name, rank in ranks.items()
    }
    for kind, stream in streams.items():
        stream.check(choices[kind], alone=stream.spec is not spec)
        form[kind] = stream.error_form(choices[kind])
    allocated = (stream.nbytes(choices[kind]) for kind, stream in streams.items() if isinstance(stream, TransformCheck))
    return sum(allocated), form


def tensor_sizes(tensors: Mapping[str, TensorLike]) -> dict[str, int]:
    """Bytes per kind of tensor ("k.centroids", "v.mean", ...) and in total."""
    sizes: dict[str, int] = {}
    for name in sorted(tensors):
        _, _, stream, tensor = name.split(".")[:4]
        kind = f"{stream}.{tensor}"
        sizes[kind] = sizes.get(kind, 0) + tensors[name].nbytes
    return sizes | {"total": sum(sizes.values())}


@contextmanager
def _refused(where: Path) -> Iterator[None]:
    """Name the file, and what to do, in the errors of a check. A UsageError would blame the command line."""
    try:
        yield
    except KvqError as error:
        raise KvqError(f"{where}: {error}" + ("" if isinstance(error, UsageError) else ": calibrate again")) from error


def _model_shape(model: Mapping[str, Any]) -> ModelShape:
    known = model["fingerprint"]
    sizes = {key: known[key] for key in ("layers", "query_heads", "kv_heads", "head_dim", "hidden_size")}
    attention = tuple(known.get("attention", ()))
    if list(attention) != sorted({*attention} & {*range(known["layers"])}):
        raise KvqError("model.fingerprint.attention must be indices of its layers, in order")
    return ModelShape(**sizes, dtype=model["dtype"], attention=attention)


def _check_options(options: Mapping[str, Any], method: Method) -> None:
    """Options must have the type that calibration writes: flags and strings are converted, files are not."""
    for key, value in options.items():
        parsed = getattr(method, key)
        if type(value) is not type(parsed) or value != parsed:
            raise KvqError(f"method.{key} must be {parsed!r}, as it is written by calibration")


def _by_layer(
    tensors: Mapping[str, StoredTensor], shape: ModelShape, where: Path
) -> dict[int, dict[str, StoredTensor]]:
    """The tensors of each layer with a compressed cache by their names without `layers.<i>.`."""
    found: dict[int, dict[str, StoredTensor]] = {index: {} for index in shape.cached_layers}
    indices = {str(index): index for index in found}
    for full, tensor in sorted(tensors.items()):  # so that equal artifacts give equal messages
        head, _, rest = full.partition(".")
        layer, _, name = rest.partition(".")
        if head != "layers" or layer not in indices or not name:
            raise KvqError(
                f"{where}: unknown tensor {full[:80]!r} for a model of {shape.layers} layers: calibrate again"
            )
        found[indices[layer]][name] = tensor
    return found


def _check_layout(tensors: Mapping[str, StoredTensor], layout: Tensors, prefix: str) -> None:
    for name in tensors:
        if name not in layout:
            raise KvqError(f"the method's options do not allow a tensor {prefix + name[:80]!r}")
    for name, like in layout.items():
        if name not in tensors:
            raise KvqError(f"tensor {prefix}{name} is missing")
        check_tensor(tensors[name], like, prefix + name)

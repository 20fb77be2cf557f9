"""Cache size of a method for a model's shape: the real cache classes, filled with tensors on PyTorch's meta device.

Meta tensors have a shape and a dtype but no memory. The layers, streams and codecs are the ones that run, so that a
cache of 128k tokens of a 70B model is counted in seconds, without its weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from kvq_cli.attention.rotary import Rotation
from kvq_cli.cache.cross_layer import CrossLayerSum
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.report import CacheReport, report
from kvq_cli.cache.rows import Rows
from kvq_cli.methods.base import Method, ModelShape
from kvq_cli.methods.tensors import layer_layout

META = torch.device("meta")


def account(method: Method, shape: ModelShape, context: int, batch: int = 1) -> CacheReport:
    """Return the cache report after a prefill of `batch` sequences of `context` tokens each, with a CPU's tables.

    UsageError if the method's options do not fit the shape.
    """
    sums = CrossLayerSum()
    rotation = Rotation("none", torch.empty(0), shape.head_dim)
    distinct: dict[Any, list[CompressedLayer]] = {}
    for index in range(shape.layers):
        plan = method.plan(index, shape, artifact_tensors(method, shape, index))
        # Layers that take part in a sum over layers hold it one after another: none stands for others.
        key = index if plan.cross_layer else _structure(plan)
        distinct.setdefault(key, []).append(CompressedLayer(index, plan, rotation, cross_layer=sums))
    prefill([alike[0] for alike in distinct.values()], shape, context, batch)
    return _total([(report(alike[:1], method.nominal_bits), len(alike)) for alike in distinct.values()])


def _structure(value: Any) -> Any:
    """A hashable description of a plan or a part of it, equal where both store the same numbers in the same form."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype, None if value.is_meta else tuple(value.flatten().tolist())
    if callable(value):  # a class or a function: equal only to itself
        return value
    if isinstance(value, Mapping):
        return tuple((key, _structure(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_structure, value))
    return (type(value), _structure(vars(value))) if hasattr(value, "__dict__") else value


def prefill(layers: Sequence[CompressedLayer], shape: ModelShape, context: int, batch: int) -> None:
    """Fill layers with `batch` sequences of `context` tokens without memory."""
    forward = Rows().begin(0, context, batch)
    keys, queries = (
        torch.empty(batch, heads, context, shape.head_dim, dtype=shape.dtype, device=META)
        for heads in (shape.kv_heads, shape.query_heads)
    )
    x = torch.empty(batch, context, shape.hidden_size, dtype=shape.dtype, device=META)
    for layer in layers:
        layer.begin(forward)
        layer.capture_key(keys)
        layer.capture_input(x)
        layer.update(keys, keys)
        layer.absorb(queries)
        layer.release()
        for stream in layer.streams:
            stream.read(0)  # the tables of decoding are made when it is first needed


def _total(reports: Sequence[tuple[CacheReport, int]]) -> CacheReport:
    """The report of all layers. reports: one per layer and how many layers it stands for."""
    first, layers = reports[0][0], sum(count for _, count in reports)

    def total(part: str) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for each, count in reports:
            sums.update({name: count * size for name, size in getattr(each, part).items()})
        return dict(sums)

    working: dict[str, int] = {}
    for each, _ in reports:
        working |= {name: max(size, working.get(name, 0)) for name, size in each.working.items()}
    return replace(
        first,
        parts=total("parts"),
        constants=total("constants"),
        tables=total("tables"),
        working=working,
        numbers=sum(count * each.numbers for each, count in reports),
        compressed=sum(count * each.compressed for each, count in reports) / layers,
    )


def artifact_bytes(method: Method, shape: ModelShape) -> Mapping[str, int]:
    """Return the bytes of the method's artifact by kind of tensor ("centroids", "mean", "down", ...); empty without
    calibration."""
    nbytes: dict[str, int] = {}
    for index in range(shape.layers):
        for name, tensor in artifact_tensors(method, shape, index).items():
            kind = name.split(".")[1]
            nbytes[kind] = nbytes.get(kind, 0) + tensor.numel() * tensor.element_size()
    return nbytes


@cache
def artifact_tensors(method: Method, shape: ModelShape, layer: int) -> dict[str, Tensor]:
    """Return a layer's artifact tensors on the meta device; of a hybrid's candidate shapes the first, as all have the
    same size."""
    if not method.calibrates:
        return {}
    first = [0] * shape.kv_heads
    layout = layer_layout(method.calibration(shape), shape, layer, {"k": first, "v": first})
    # The plan reads the values of `choice`, so that it is a real tensor.
    return {
        name: torch.zeros(size, dtype=dtype, device="cpu" if name.endswith(".choice") else META)
        for name, (size, dtype) in layout.items()
    }

"""Cache size of a method for a model's shape: real streams, filled with tensors without memory.

Meta tensors have a shape and a dtype but no memory. The streams are the ones that run, and codecs encode one real block
(`sized`), so that a cache of 128k tokens of a 70B model is counted in milliseconds, without its weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from kvq_cli.benchmarking.sized import META, SizedCodec, sized
from kvq_cli.cache.prompt_stream import PromptStream, new_stream
from kvq_cli.cache.report import CacheReport, report
from kvq_cli.cache.rows import Rows
from kvq_cli.cache.stream import Stream
from kvq_cli.codecs.base import Prompt
from kvq_cli.methods.base import CrossLayer, LayerPlan, Method, ModelShape, StreamPlan
from kvq_cli.methods.specs import Layout
from kvq_cli.vllm.shard import WHOLE, Shard, head_tensors


@dataclass(frozen=True)
class Accumulator:
    """The sum X^ over layers in one layer's turn. peak: as `CrossLayerSum.peak`."""

    peak: int


@dataclass(frozen=True)
class CountedLayer:
    """A layer as `report` counts it: streams that hold tensors without memory, and how many layers it stands for."""

    plan: LayerPlan
    streams: tuple[Stream, ...]
    numbers_per_token: int
    cross_layer: Accumulator | None
    count: int
    sliding_window: int | None = None

    @property
    def key_stream(self) -> Stream:
        return self.streams[0]

    @property
    def value_stream(self) -> Stream:
        return self.streams[-1]


def account(method: Method, shape: ModelShape, context: int, batch: int = 1) -> CacheReport:
    """Return the cache report after a prefill of `batch` sequences of `context` tokens each, with the tables that a CPU
    holds once it has packed and read a token.

    UsageError if the method's options do not fit the shape.
    """
    layers = counted_layers(method, shape, context, batch)
    return _total([(report([layer], method.nominal_bits), layer.count) for layer in layers])


def counted_layers(method: Method, shape: ModelShape, context: int, batch: int = 1) -> list[CountedLayer]:
    """The distinct layers of a cache after a prefill of `batch` sequences of `context` tokens, without memory."""
    layers = []
    for plan, count in _distinct_plans(method, shape):
        streams = tuple(_filled(stream, shape, context, batch) for stream in plan.kept)
        accumulator = None
        if plan.cross_layer is not None:
            packed = streams[0].window.packed(context)
            accumulator = Accumulator(_turn_bytes(plan.cross_layer, streams[0].plan, shape, packed, batch))
        layers.append(CountedLayer(plan, streams, 2 * shape.kv_heads * shape.head_dim, accumulator, count))
    return layers


@lru_cache(maxsize=32)
def _distinct_plans(method: Method, shape: ModelShape) -> tuple[tuple[LayerPlan, int], ...]:
    """The plans that differ, with codecs that encode tensors without memory, and how many layers have each."""
    return tuple((_without_memory(plan, shape), count) for plan, count in distinct_plans(method, shape))


def distinct_plans(method: Method, shape: ModelShape, shard: Shard = WHOLE) -> list[tuple[LayerPlan, int]]:
    """The plans that differ in what they store, and how many layers have each; tensors of artifacts are stand-ins.

    shape: of all heads, of which the plans have those of `shard`. UsageError if the method's options do not fit the
    shape.
    """
    distinct: dict[Any, list[LayerPlan]] = {}
    for index in range(shape.layers):
        plan = shard.plan(method, index, shape, artifact_tensors(method, shape, index))
        distinct.setdefault(_structure(plan), []).append(plan)
    return [(plans[0], len(plans)) for plans in distinct.values()]


def _without_memory(plan: LayerPlan, shape: ModelShape) -> LayerPlan:
    def stream(each: StreamPlan) -> StreamPlan:
        heads, dim = _heads_and_dim(each, shape)
        return replace(each, codec=sized(each.codec, heads, dim, shape.query_heads, shape.dtype))

    keys = stream(plan.keys)
    return replace(plan, keys=keys, values=plan.values if plan.shared else stream(plan.values))


def _heads_and_dim(plan: StreamPlan, shape: ModelShape) -> tuple[int, int]:
    if plan.source != "input":
        return shape.kv_heads, shape.head_dim
    return 1, shape.hidden_size if plan.down is None else plan.down.shape[1]


def _filled(plan: StreamPlan, shape: ModelShape, context: int, batch: int) -> Stream:
    """A stream of `batch` rows of `context` tokens."""
    stream, groups = new_stream(plan), Rows().begin(0, context, batch).row_groups
    heads, dim = _heads_and_dim(plan, shape)
    x = torch.empty(batch, heads, context, dim, dtype=shape.dtype, device=META)
    if isinstance(stream, PromptStream):
        stream.announce(groups, {group.rows.start: Prompt(x, x, x) for group in groups}, {})
    stream.append(x, groups)
    return stream


def _turn_bytes(part: CrossLayer, plan: StreamPlan, shape: ModelShape, packed: int, batch: int) -> int:
    """Bytes of X^ of `packed` tokens, and of its latents, in a layer's turn."""
    if not packed:
        return 0
    total = torch.empty(batch, 1, packed, shape.hidden_size, dtype=shape.dtype, device=META)
    latents = 0 if plan.down is None else total.nbytes * plan.down.shape[1] // shape.hidden_size
    between = total.nbytes
    if part.accumulator is not None:
        block = torch.zeros(1, 1, part.accumulator.block_tokens, shape.hidden_size, dtype=shape.dtype)
        between = SizedCodec(part.accumulator, block).encode(total).nbytes
    decoded = 0 if part.accumulator is None else total.nbytes
    below = 0 if part.first else between + decoded + latents
    # Without latents, attention reads X^ itself.
    read = latents or (total.nbytes if part.last or part.accumulator is not None else 0)
    return below + read + (0 if part.last else between)


def _structure(value: Any) -> Any:
    """A hashable description of a plan or a part of it, equal where both store the same numbers in the same form."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if callable(value):  # a class or a function: equal only to itself
        return value
    if isinstance(value, Mapping):
        return tuple((key, _structure(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_structure, value))
    return (type(value), _structure(vars(value))) if hasattr(value, "__dict__") else value


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


def artifact_bytes(method: Method, shape: ModelShape, shard: Shard = WHOLE) -> Mapping[str, int]:
    """Return the bytes of the method's artifact by kind of tensor ("centroids", "mean", "down", ...), for the heads of
    `shard`; empty without calibration."""
    nbytes: Counter[str] = Counter()
    for index in range(shape.layers):
        if shard.ranks > 1:
            tensors = artifact_tensors(method, shape, index)
            tensors = head_tensors(method, index, shape, tensors, shard.heads(shape.kv_heads))
            sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
        else:
            layout = _layout(method, shape, index)
            sizes = {name: math.prod(size) * dtype.itemsize for name, (size, dtype) in layout.items()}
        for name, size in sizes.items():
            nbytes[name.split(".")[1]] += size
    return dict(nbytes)


def artifact_tensors(method: Method, shape: ModelShape, layer: int) -> dict[str, Tensor]:
    """Return a layer's artifact tensors, all zero and shared with other layers; of a hybrid's candidate shapes the
    first, as all have the same size; of transforms, the allocation that gives all components the same bits."""
    tensors = {name: _zeros(name, size, dtype) for name, (size, dtype) in _layout(method, shape, layer).items()}
    rows = {f"{kind}.allocation": rows for kind, rows in _choices(method, shape, layer).items()}
    return tensors | {name: torch.tensor(rows[name], dtype=torch.int16) for name in tensors.keys() & rows.keys()}


@cache
def _layout(method: Method, shape: ModelShape, layer: int) -> Layout:
    if not method.calibrates:
        return {}
    return method.calibration(shape).layout(shape, layer, _choices(method, shape, layer))


@cache
def _choices(method: Method, shape: ModelShape, layer: int) -> dict[str, list[Any]]:
    """By stream, what `Spec.layout` takes before anything is measured."""
    return method.calibration(shape).first_choices(shape, layer) if method.calibrates else {}


@lru_cache(maxsize=64)
def _zeros(name: str, size: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(size, dtype=dtype)

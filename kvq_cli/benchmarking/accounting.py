"""Cache size of a method for a model's shape, counted from the layouts of its codecs.

Nothing is encoded and PyTorch is not imported: a cache of 128k tokens of a 70B model is counted in milliseconds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from kvq_cli.cache.growth import grown
from kvq_cli.cache.report import CacheReport, seen_tokens
from kvq_cli.cache.sliding import Sliding
from kvq_cli.codecs.base import TABLES, PromptCodec
from kvq_cli.codecs.layout import ITEMSIZE, Layout, TensorLike, TensorSpec
from kvq_cli.methods.base import CrossLayer, LayerPlan, Method, ModelShape, StreamPlan
from kvq_cli.methods.specs import Tensors


def account(method: Method, shape: ModelShape, context: int, batch: int = 1) -> CacheReport:
    """Return the cache report after a prefill of `batch` sequences of `context` tokens each, with the tables that a CPU
    holds once it has packed and read a token.

    UsageError if the method's options do not fit the shape.
    """
    parts: Counter[str] = Counter()
    constants: Counter[str] = Counter()
    tables: Counter[str] = Counter()
    working: dict[str, int] = {}
    packed, per_token, numbers = 0.0, 2 * shape.kv_heads * shape.head_dim, seen_numbers(shape, context, batch)
    held_tokens = 0
    for plan, window, count in _plans(method, shape):
        sliding = Sliding.of(plan, window)
        dropped = 0 if sliding is None else sliding.dropped([context])
        held_tokens += count * batch * (context - dropped)
        held: dict[int, tuple[str, TensorSpec]] = {}
        for stream in plan.kept:
            layout = _layout(stream, shape, stream.window.packed(context))
            room = sliding.room(stream.window) if sliding is not None and dropped else 0
            sizes = _stream_bytes(stream, layout, shape, context, batch, dropped, room)
            parts.update({name: count * size for name, size in sizes.items()})
            held |= {id(spec): (name, spec) for name, spec in layout.constants.items()}
        for stream in (plan.keys, plan.values):
            for name, factor in (("down", stream.down), ("up", stream.up)):
                if isinstance(factor, TensorSpec):
                    held[id(factor)] = (name, factor)
            packed += count * batch * stream.window.behind(dropped).packed(context - dropped) / 2
        for name, spec in held.values():
            kind = tables if name.rpartition(".")[2] in TABLES else constants
            kind[name] += count * spec.nbytes
        if plan.cross_layer is not None:
            tokens = plan.keys.window.packed(context)
            turn = _turn_bytes(plan.cross_layer, plan.keys, shape, tokens, batch)
            if turn:
                working["accumulator"] = max(turn, working.get("accumulator", 0))
        waiting = sum(each.codec.waiting_bytes * each.window.packed(context) for each in plan.kept)
        if waiting:
            working["components"] = batch * waiting
    return CacheReport(
        method.nominal_bits,
        dict(parts),
        dict(constants),
        numbers=numbers,
        tokens=batch * context,
        compressed=packed / len(shape.cached_layers),
        tables=dict(tables),
        working=working,
        beyond_window=held_tokens * per_token - numbers,
        packed_numbers=packed * per_token,
    )


def seen_numbers(shape: ModelShape, context: int, batch: int = 1) -> int:
    """The numbers that transformers' own cache holds of `batch` sequences of `context` tokens: layers with a sliding
    window drop the tokens before it."""
    tokens = sum(seen_tokens(context, shape.window(layer)) for layer in shape.cached_layers)
    return batch * tokens * 2 * shape.kv_heads * shape.head_dim


@lru_cache(maxsize=32)
def _plans(method: Method, shape: ModelShape) -> tuple[tuple[LayerPlan, int | None, int], ...]:
    """The plans and sliding windows that differ, and how many layers have each."""
    return tuple(_distinct(shape, lambda layer: method.layer_plan(layer, shape, artifact_specs(method, shape, layer))))


def distinct_plans(shape: ModelShape, plan: Callable[[int], LayerPlan]) -> list[tuple[LayerPlan, int]]:
    """The plans that differ in what they store, and how many layers have each. plan: of a layer."""
    return [(planned, count) for planned, _, count in _distinct(shape, plan)]


def _distinct(shape: ModelShape, plan: Callable[[int], LayerPlan]) -> list[tuple[LayerPlan, int | None, int]]:
    distinct: dict[Any, list[tuple[LayerPlan, int | None]]] = {}
    for layer in shape.cached_layers:
        planned, window = plan(layer), shape.window(layer)
        distinct.setdefault((_structure(planned), window), []).append((planned, window))
    return [(*alike[0], len(alike)) for alike in distinct.values()]


def _heads_and_dim(plan: StreamPlan, shape: ModelShape) -> tuple[int, int]:
    if plan.source != "input":
        return shape.kv_heads, shape.head_dim
    return 1, shape.hidden_size if plan.down is None else plan.down.shape[1]


def _layout(plan: StreamPlan, shape: ModelShape, packed: int) -> Layout:
    """The layout of a stream of which `packed` tokens are packed."""
    heads, dim = _heads_and_dim(plan, shape)
    if isinstance(plan.codec, PromptCodec):
        return plan.codec.layout(heads, dim, shape.dtype, packed)
    return plan.codec.layout(heads, dim, shape.dtype)


def _stream_bytes(
    plan: StreamPlan, layout: Layout, shape: ModelShape, context: int, batch: int, dropped: int, reserved: int
) -> dict[str, int]:
    """As `Stream.bytes_by_part`, of `batch` rows of `context` tokens that came at once, of which the first are dropped.
    reserved: packed tokens of a row for which there is room then."""
    (heads, dim), has_state = _heads_and_dim(plan, shape), plan.window.packed(context) > 0
    context, window = context - dropped, plan.window.behind(dropped)
    token, packed, sinks = heads * dim * ITEMSIZE[shape.dtype], window.packed(context), min(context, window.sinks)
    room = grown(packed, 0, reserved, plan.codec.block_tokens) if packed else 0
    sizes = {name: batch * part.nbytes(packed) for name, part in layout.parts.items()}
    parts = {name: size for name, size in sizes.items() if size}
    parts["sinks"] = batch * token * sinks
    parts["recent"] = batch * token * (context - sinks - packed)
    allocated = batch * (
        token * (window.sinks + plan.window.ring) + sum(part.nbytes(room) for part in layout.parts.values())
    )
    parts["unused"] = allocated - sum(parts.values())
    rows = 1 if isinstance(plan.codec, PromptCodec) and plan.codec.shares_state else batch
    for name, spec in layout.state.items():
        if has_state or name in layout.fitted:
            parts[name] = parts.get(name, 0) + rows * spec.nbytes
    return parts


def _turn_bytes(part: CrossLayer, plan: StreamPlan, shape: ModelShape, packed: int, batch: int) -> int:
    """Bytes of X^ of `packed` tokens, and of its latents, in a layer's turn; see `CrossLayerSum.peak`."""
    if not packed:
        return 0
    total = batch * packed * shape.hidden_size * ITEMSIZE[shape.dtype]
    latents = 0 if plan.down is None else total * plan.down.shape[1] // shape.hidden_size
    between, decoded = total, 0
    if part.accumulator is not None:
        parts = part.accumulator.layout(1, shape.hidden_size, shape.dtype).parts
        between, decoded = batch * sum(each.nbytes(packed) for each in parts.values()), total
    below = 0 if part.first else between + decoded + latents
    # Without latents, attention reads X^ itself.
    read = latents or (total if part.last or part.accumulator is not None else 0)
    return below + read + (0 if part.last else between)


def _structure(value: Any) -> Any:
    """A hashable description of a plan or a part of it, equal where both store the same numbers in the same form."""
    if isinstance(value, TensorSpec) or callable(value):  # a class or a function: equal only to itself
        return value
    if isinstance(value, Mapping):
        return tuple((key, _structure(each)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(_structure, value))
    return (type(value), _structure(vars(value))) if hasattr(value, "__dict__") else value


def artifact_bytes(method: Method, shape: ModelShape) -> Mapping[str, int]:
    """Return the bytes of the method's artifact by kind of tensor ("centroids", "mean", "down", ...); empty without
    calibration."""
    return bytes_by_kind(artifact_specs(method, shape, layer) for layer in shape.cached_layers)


def bytes_by_kind(layers: Iterable[Mapping[str, TensorLike]]) -> Mapping[str, int]:
    """The bytes by kind of tensor of an artifact's layers."""
    nbytes: Counter[str] = Counter()
    for tensors in layers:
        for name, spec in tensors.items():
            nbytes[name.split(".")[1]] += spec.nbytes
    return dict(nbytes)


@lru_cache(maxsize=4096)
def artifact_specs(method: Method, shape: ModelShape, layer: int) -> Tensors:
    """Return what stands for a layer's artifact tensors, as `Method.plan` takes them.

    Of a hybrid's candidate shapes the first, as all have the same size; of transforms, the allocation that gives all
    components the same bits.
    """
    if not method.calibrates:
        return {}
    spec = method.calibration(shape)
    return spec.layout(shape, layer, spec.first_choices(shape, layer))

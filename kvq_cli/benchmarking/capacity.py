"""The longest context and largest batch that fit into a memory budget beside the weights, for a method's cache.

The cache is kvq's own, or held in vLLM's blocks as `kvq serve` lays them out (docs/SERVING.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kvq_cli.benchmarking.accounting import account, artifact_bytes, artifact_specs, bytes_by_kind, distinct_plans
from kvq_cli.codecs.layout import TensorLike
from kvq_cli.methods.base import LayerPlan, Method, ModelShape

if TYPE_CHECKING:
    from kvq_cli.vllm.layout import CacheLayout


@dataclass(frozen=True)
class Capacity:
    """A method's memory use, and its limits within a budget. Sizes are in bytes.

    weights, artifact, cache: bytes of the model, the method's constants, and the cache at the given context and batch,
    with what passes hold beside it (xquant-cl's X^, kvtc's components). fits: whether their sum is within the budget,
    and the given context within the model's. context: the longest context at the given batch. batch: the largest batch
    at the given context. Both are 0 if nothing fits. block_tokens, blocks: of vLLM, in the memory that weights and
    constants leave; bits: of a block for each packed number. None for kvq's own cache.
    """

    weights: int
    artifact: int
    cache: int
    fits: bool
    context: int
    batch: int
    block_tokens: int | None = None
    blocks: int | None = None
    bits: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def capacity(
    method: Method, shape: ModelShape, weights: int, limit: int, context: int, batch: int, budget: int
) -> Capacity:
    """Return what fits into `budget` bytes beside a model of `weights` bytes and the method's artifact.

    limit: the model's maximum context. UsageError if the method's options do not fit the shape.
    """

    def cache_bytes(tokens: int, rows: int) -> int:
        report = account(method, shape, tokens, rows)
        return report.bytes + sum(report.working.values())

    return _capacity(cache_bytes, artifact_bytes(method, shape), weights, limit, context, batch, budget)


def serving_capacity(
    method: Method, shape: ModelShape, weights: int, limit: int, context: int, batch: int, budget: int, ranks: int = 1
) -> Capacity:
    """`capacity` in vLLM's blocks: `batch` requests that decode at the same time, `context` tokens each.

    A request holds the blocks of its packed tokens, those of its sinks and newest tokens, and those of the tokens that
    layers with a sliding window see, in 16 bits; one block is vLLM's own.
    Blocks of the prompt tokens that a step computes come on top. UsageError for a method that cannot be served.

    ranks: of tensor parallelism. Bytes are then those of one rank, `budget` and `weights` too: it has its share of the
    weights, and of the kv heads.
    """
    from kvq_cli.vllm.local_layers import served_shape
    from kvq_cli.vllm.shard import Shard

    shape = served_shape(method, shape)
    layout, shard = serving_layout(method, shape, ranks), Shard(0, ranks)
    block = layout.page_bytes * layout.slots

    def cache_bytes(tokens: int, rows: int) -> int:
        return (1 + rows * layout.blocks_of(tokens)) * block

    constants = bytes_by_kind(_rank_tensors(method, shape, layer, ranks) for layer in shape.cached_layers)
    found = _capacity(cache_bytes, constants, weights, limit, context, batch, budget)
    blocks = max(0, layout.blocks(budget - weights - found.artifact))
    return replace(found, block_tokens=layout.block_size, blocks=blocks, bits=layout.bits(shard.shape(shape)))


def serving_layout(method: Method, shape: ModelShape, ranks: int = 1) -> CacheLayout:
    """The layout of vLLM's pages of a rank that `kvq serve` chooses. UsageError for a method that cannot be served."""
    from kvq_cli.vllm.checks import check_plans
    from kvq_cli.vllm.layout import cache_layout
    from kvq_cli.vllm.local_layers import served_shape
    from kvq_cli.vllm.shard import Shard

    shape, shard = served_shape(method, shape), Shard(0, ranks)
    of_rank = shard.shape(shape)

    def plan(layer: int) -> LayerPlan:
        return shard.plan(method, layer, shape, artifact_specs(method, shape, layer))

    plans = [plan for plan, count in distinct_plans(shape, plan) for _ in range(count)]
    check_plans(method, plans)
    return cache_layout(plans, of_rank)


def _rank_tensors(method: Method, shape: ModelShape, layer: int, ranks: int) -> Mapping[str, TensorLike]:
    """What stands for a layer's artifact tensors, of the heads of one rank."""
    from kvq_cli.vllm.shard import Shard, head_tensors

    tensors = artifact_specs(method, shape, layer)
    heads = Shard(0, ranks).heads(shape.kv_heads)
    return tensors if ranks == 1 else head_tensors(method, layer, shape, tensors, heads)


def _capacity(
    cache_bytes: Callable[[int, int], int],
    constants: Mapping[str, int],
    weights: int,
    limit: int,
    context: int,
    batch: int,
    budget: int,
) -> Capacity:
    """cache_bytes: `(tokens, sequences)` -> bytes."""
    artifact = sum(constants.values())
    available = budget - weights - artifact
    cache = cache_bytes(context, batch)
    longest = largest(lambda tokens: cache_bytes(tokens, batch) <= available, context, limit)
    # Bytes are linear in the batch: every tensor of the cache has one entry per sequence.
    per_row = cache_bytes(context, 2) - cache_bytes(context, 1)
    rows = max(0, (available - cache_bytes(context, 1)) // per_row + 1) if available > 0 and context <= limit else 0
    return Capacity(weights, artifact, cache, cache <= available and context <= limit, longest, rows)


def largest(fits: Callable[[int], bool], start: int, limit: int) -> int:
    """Return the largest number up to `limit` for which the monotonic predicate `fits` is true, by bisection from
    `start`; 0 if it is false for 1. Exact below 4096, above to within 1/4096."""
    low, high = 0, min(start, limit)
    while high < limit and fits(high):
        low, high = high, min(2 * high, limit)
    if fits(high):
        return high
    while high - low > max(1, low >> 12):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low

"""Decode throughput and peak memory at growing batch size, up to the first batch that runs out of memory.

Prefill runs on one sequence, whose cache is then repeated to the batch: only decoding and its memory are measured.
Steps that pack tokens take longer, and some methods have one in 128. So each kind of step is timed by itself, and the
time per token is their mean weighted by frequency. The same step is timed again and again, with the cache set back in
between: its second run is captured in a CUDA graph, which later ones replay, and none has to wait for 128 others.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvq_cli.benchmarking.baselines import BenchmarkedCache, StepKind
from kvq_cli.benchmarking.generate import synchronize
from kvq_cli.benchmarking.machine import PeakMemory
from kvq_cli.cache_argument import cache_argument
from kvq_cli.errors import is_out_of_memory
from kvq_cli.models import model_context, vocabulary

#: Decode steps of a kind before timing starts: the first compiles kernels, the second is captured in a CUDA graph, the
#: third replays it for the first time.
WARM_UP = 3
#: Bisection steps between the largest batch that fits and the smallest that does not.
BISECTIONS = 3


@dataclass(frozen=True)
class BatchSweep:
    """Options of a sweep.

    context: prompt tokens. tokens: timed decode steps per batch, shared by the kinds of steps, of which each has one at
    least. max_batch: the largest batch. seconds: the time limit, shared equally by all caches; a cache that reaches its
    share keeps the rows so far.
    """

    context: int
    tokens: int
    max_batch: int
    seed: int
    seconds: float = math.inf


def sweep_batches(
    model: PreTrainedModel, caches: Sequence[BenchmarkedCache], sweep: BatchSweep, step: Callable[[], None]
) -> Iterator[tuple[BenchmarkedCache, list[dict[str, Any]]]]:
    """Measure each cache at batches 1, 4, 16, ... up to `max_batch` or the first that runs out of memory, then bisect
    `BISECTIONS` times between the largest batch that fits and the smallest that does not. Yields each cache with its
    rows.

    tokens_s: decoded tokens of all sequences per second. peak_bytes: weights excluded, cache included; None on a CPU.
    A row with "failed" is a batch that ran out of memory, "message" the allocator's account of it. Kernels are compiled
    before the time limit starts. `step` is called after each batch.
    """
    for benchmarked in caches:
        _measure_batch(model, benchmarked, 1, sweep)
    end = time.monotonic() + sweep.seconds
    for index, benchmarked in enumerate(caches):
        cache_end = time.monotonic() + max(0.0, end - time.monotonic()) / (len(caches) - index)
        yield benchmarked, list(_sweep_cache(model, benchmarked, sweep, cache_end, step))


def _sweep_cache(
    model: PreTrainedModel, benchmarked: BenchmarkedCache, sweep: BatchSweep, end: float, step: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    largest_fit, smallest_failed, bisections, batch = 0, None, BISECTIONS, 1
    while largest_fit < batch and batch != smallest_failed:
        row = _measure_batch(model, benchmarked, batch, sweep)
        step()
        yield row
        largest_fit, smallest_failed = (largest_fit, batch) if "failed" in row else (batch, smallest_failed)
        if time.monotonic() > end or (smallest_failed is not None and bisections == 0):
            break
        batch = min(4 * batch, sweep.max_batch) if smallest_failed is None else (largest_fit + smallest_failed) // 2
        bisections -= smallest_failed is not None


def _measure_batch(
    model: PreTrainedModel, benchmarked: BenchmarkedCache, batch: int, sweep: BatchSweep
) -> dict[str, Any]:
    case = {"peer": benchmarked.name, "bits": benchmarked.bits, "context": sweep.context, "batch": batch}
    try:
        measured = _decode(model, benchmarked, batch, sweep)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # The allocator's message says what the memory is held by.
        measured = {"failed": "out of memory", "message": str(error)}
    if model.device.type == "cuda":
        gc.collect()  # the exception's traceback holds tensors
        torch.cuda.empty_cache()
    return case | {"backend": benchmarked.backend} | measured


@torch.no_grad()
def _decode(model: PreTrainedModel, benchmarked: BenchmarkedCache, batch: int, sweep: BatchSweep) -> dict[str, Any]:
    # On a CPU the memory profiler would slow down the timed steps.
    memory = PeakMemory(model.device) if model.device.type == "cuda" else nullcontext()
    token_seconds, cache_bytes = 0.0, 0
    with benchmarked.on(model) as new_cache, memory as peak:
        context = max(sweep.context, 2)  # one token is in the cache when a step is timed again
        for kind in benchmarked.step_kinds(context, model_context(model.config)):
            seconds, nbytes = _time_kind(model, benchmarked, new_cache, kind, batch, sweep)
            token_seconds += kind.share * seconds
            cache_bytes = cache_bytes or nbytes
    return {
        "token_ms": round(1000 * token_seconds, 3),
        "tokens_s": round(batch / token_seconds, 2),
        "cache_bytes": cache_bytes,
        "peak_bytes": peak and peak.bytes,
    }


def _time_kind(
    model: PreTrainedModel,
    benchmarked: BenchmarkedCache,
    new_cache: Callable[[int], Cache],
    kind: StepKind,
    batch: int,
    sweep: BatchSweep,
) -> tuple[float, int]:
    """Return the mean seconds of a step of this kind, and the bytes of the cache."""
    generator = torch.Generator().manual_seed(sweep.seed)
    ids = torch.randint(vocabulary(model), (1, kind.past + 1), generator=generator).to(model.device)
    token = ids[:, -1:].expand(batch, 1)
    before = kind.past - benchmarked.can_rewind
    cache = new_cache(kind.past + 1)
    _forward(model, ids[:, :before], cache)
    cache.batch_repeat_interleave(batch)
    seconds = []
    for _ in range(WARM_UP + math.ceil(sweep.tokens * kind.share)):
        if benchmarked.can_rewind:
            benchmarked.rewind(cache, before)
            _forward(model, token, cache)  # sends the changed lengths to the device, as no captured step does
        seconds.append(_forward(model, token, cache))
    return statistics.mean(seconds[WARM_UP:]), benchmarked.nbytes(cache)


def _forward(model: PreTrainedModel, ids: Tensor, cache: Cache) -> float:
    """Run a forward pass and return its seconds."""
    synchronize(model)
    start = time.perf_counter()
    model(input_ids=ids, **cache_argument(cache), use_cache=True, logits_to_keep=1)
    synchronize(model)
    return time.perf_counter() - start

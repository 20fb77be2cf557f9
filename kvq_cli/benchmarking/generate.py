"""Prefill and decode time, memory and cache bytes of several KV caches on the same model.

Each round runs every cache once, in turn, so that a machine that slows down slows all of them; the first round is a
warm-up and not counted. All caches process the same random tokens. A last round measures memory without timing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvq_cli.benchmarking.baselines import BenchmarkedCache
from kvq_cli.benchmarking.machine import PeakMemory
from kvq_cli.cache_argument import cache_argument
from kvq_cli.errors import UsageError
from kvq_cli.models import vocabulary


@dataclass(frozen=True)
class BenchmarkGrid:
    """Prompt lengths and batch sizes to measure. tokens: decoded per round. rounds: timed rounds, after a warm-up."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    tokens: int
    rounds: int
    seed: int

    def check(self, context: int, warm_up: int) -> None:
        """UsageError if a case exceeds the model's context. warm_up: tokens decoded before the timed ones."""
        decoded = warm_up + self.tokens
        if max(self.contexts) + decoded > context:
            raise UsageError(
                f"--context {max(self.contexts)} and {decoded} decoded tokens exceed the context of {context}"
            )

    def cases(self) -> list[tuple[int, int]]:
        """Return all pairs (context, batch), small ones first."""
        return [(context, batch) for batch in self.batches for context in self.contexts]

    @property
    def runs(self) -> int:
        """The number of runs per cache for a progress bar, with the warm-up and the memory round."""
        return len(self.cases()) * (self.rounds + 2)


@dataclass(frozen=True)
class RunTimes:
    """Seconds of the prefill and of each decoded token, and the bytes of the cache after the last one."""

    prefill: float
    tokens: list[float]
    cache_bytes: int


def measure(
    model: PreTrainedModel,
    caches: Sequence[BenchmarkedCache],
    grid: BenchmarkGrid,
    step: Callable[[], None],
    start: Callable[[str], None] = lambda _: None,
) -> Iterator[dict[str, Any]]:
    """Yield a row per case and cache when the case is complete.

    `start` is called before each run, with the cache and the case as text; `step` after it.
    """
    for context, batch in grid.cases():
        generator = torch.Generator().manual_seed(grid.seed)
        ids = torch.randint(vocabulary(model), (batch, context + grid.tokens), generator=generator).to(model.device)
        runs: dict[BenchmarkedCache, list[RunTimes]] = {benchmarked: [] for benchmarked in caches}
        for round_ in range(grid.rounds + 1):
            for benchmarked in caches:
                start(f"{benchmarked.name} at context {context}, batch {batch}")
                times = _run(model, benchmarked, ids, context)
                if round_ > 0:
                    runs[benchmarked].append(times)
                step()
        for benchmarked in caches:
            start(f"{benchmarked.name} at context {context}, batch {batch}")
            with PeakMemory(model.device) as peak:
                _run(model, benchmarked, ids, context)
            step()
            yield _row(benchmarked, context, batch, runs[benchmarked], peak.bytes)


@torch.no_grad()
def _run(model: PreTrainedModel, benchmarked: BenchmarkedCache, ids: Tensor, context: int) -> RunTimes:
    """Prefill the first `context` of the token ids `[batch, tokens]`, then decode the others step by step."""
    with benchmarked.on(model) as new_cache:
        cache = new_cache(ids.shape[1])

        def forward(part: Tensor) -> float:
            synchronize(model)
            start = time.perf_counter()
            model(input_ids=part, **cache_argument(cache), use_cache=True, logits_to_keep=1)
            synchronize(model)
            return time.perf_counter() - start

        prefill = forward(ids[:, :context])
        tokens = [forward(ids[:, at : at + 1]) for at in range(context, ids.shape[1])]
        return RunTimes(prefill, tokens, benchmarked.nbytes(cache))


def _row(
    benchmarked: BenchmarkedCache, context: int, batch: int, runs: list[RunTimes], peak: int | None
) -> dict[str, Any]:
    return {
        "peer": benchmarked.name,
        "bits": benchmarked.bits,
        "backend": benchmarked.backend,
        "context": context,
        "batch": batch,
        "prefill_ms": _spread([run.prefill for run in runs]),
        "token_ms": _spread([seconds for run in runs for seconds in run.tokens]),
        "cache_bytes": runs[-1].cache_bytes,
        "peak_bytes": peak,
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    """Return the percentiles p20, p50 and p80 in milliseconds, and the number n of measurements."""
    p20, p50, p80 = np.percentile(np.array(seconds) * 1000, [20, 50, 80]).round(3).tolist()
    return {"p20": p20, "p50": p50, "p80": p80, "n": len(seconds)}


def synchronize(model: PreTrainedModel) -> None:
    """Wait until the GPU has finished all queued work; nothing on a CPU."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)

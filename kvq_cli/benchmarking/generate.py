"""Time, memory and cache bytes of prefill and decode, peer beside peer.

Each round runs every peer once, in turn, so that a machine that slows down slows all of them; the first round warms up
and is not counted. All peers read the same random tokens. One more round, outside of the timing, measures memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvq_cli.benchmarking.machine import PeakMemory
from kvq_cli.benchmarking.peers import Peer
from kvq_cli.errors import UsageError


@dataclass(frozen=True)
class Settings:
    """rounds: counted ones, after one of warm-up. tokens: decoded per round."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    tokens: int
    rounds: int
    seed: int

    def check(self, context: int, warm_up: int) -> None:
        """UsageError where a case does not fit the model's context. warm_up: tokens that are decoded before others."""
        decoded = warm_up + self.tokens
        if max(self.contexts) + decoded > context:
            raise UsageError(
                f"--context {max(self.contexts)} and {decoded} decoded tokens exceed the context of {context}"
            )

    def cases(self) -> list[tuple[int, int]]:
        """(context, batch), small first."""
        return [(context, batch) for batch in self.batches for context in self.contexts]

    @property
    def runs(self) -> int:
        """Runs per peer, the warm-up and the one for memory included: for a progress bar."""
        return len(self.cases()) * (self.rounds + 2)


@dataclass(frozen=True)
class Run:
    """Seconds of the prefill and of each decoded token; bytes of the cache at the end."""

    prefill: float
    tokens: list[float]
    cache_bytes: int


def measure(
    model: PreTrainedModel, peers: Sequence[Peer], settings: Settings, step: Callable[[], None]
) -> Iterator[dict]:
    """One row per case and peer, as soon as its case is done; `step` is called after each run."""
    for context, batch in settings.cases():
        generator = torch.Generator().manual_seed(settings.seed)
        vocabulary = model.config.get_text_config().vocab_size
        ids = torch.randint(vocabulary, (batch, context + settings.tokens), generator=generator).to(model.device)
        runs: dict[Peer, list[Run]] = {peer: [] for peer in peers}
        for round_ in range(settings.rounds + 1):
            for peer in peers:
                found = _run(model, peer, ids, context)
                if round_ > 0:
                    runs[peer].append(found)
                step()
        for peer in peers:
            with PeakMemory(model.device) as peak:
                _run(model, peer, ids, context)
            step()
            yield _row(peer, context, batch, runs[peer], peak.bytes)


@torch.no_grad()
def _run(model: PreTrainedModel, peer: Peer, ids: Tensor, context: int) -> Run:
    with peer.on(model) as new_cache:
        cache = new_cache(ids.shape[1])

        def forward(part: Tensor) -> float:
            synchronize(model)
            start = time.perf_counter()
            model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)
            synchronize(model)
            return time.perf_counter() - start

        prefill = forward(ids[:, :context])
        tokens = [forward(ids[:, at : at + 1]) for at in range(context, ids.shape[1])]
        return Run(prefill, tokens, peer.nbytes(cache))


def _row(peer: Peer, context: int, batch: int, runs: list[Run], peak: int | None) -> dict:
    return {
        "peer": peer.name,
        "bits": peer.bits,
        "backend": peer.backend,
        "context": context,
        "batch": batch,
        "prefill_ms": _spread([run.prefill for run in runs]),
        "token_ms": _spread([seconds for run in runs for seconds in run.tokens]),
        "cache_bytes": runs[-1].cache_bytes,
        "peak_bytes": peak,
    }


def _spread(seconds: list[float]) -> dict:
    """p20, p50 and p80 in milliseconds, and how many were measured."""
    p20, p50, p80 = np.percentile(np.array(seconds) * 1000, [20, 50, 80]).round(3).tolist()
    return {"p20": p20, "p50": p50, "p80": p80, "n": len(seconds)}


def synchronize(model: PreTrainedModel) -> None:
    """Wait until a GPU has done what it was given."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)

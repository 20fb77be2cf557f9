"""How much a GPU decodes at once: throughput and peak memory at growing batch, until memory ends.

The prompt is read by one row, whose cache is then repeated to the batch: what is measured is decoding, and its memory.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvq_cli.benchmarking.generate import synchronize
from kvq_cli.benchmarking.machine import PeakMemory
from kvq_cli.benchmarking.peers import Peer

#: Tokens that are decoded before any is timed: by then kernels are compiled, and steps recorded where they are.
WARM_UP = 10
#: Batches that are tried between one that fits and one that does not.
HALVINGS = 3


@dataclass(frozen=True)
class Growth:
    """context: tokens of the prompt. tokens: decoded at each batch, after the warm-up. most: the largest batch.
    seconds: for all peers together, shared out among them; rows that are measured by then are kept."""

    context: int
    tokens: int
    most: int
    seed: int
    seconds: float = math.inf


def grow(
    model: PreTrainedModel, peers: Sequence[Peer], settings: Growth, step: Callable[[], None]
) -> Iterator[tuple[Peer, list[dict]]]:
    """Measure each peer at batches 1, 4, 16, ... up to the first that memory refuses, then `HALVINGS` times halfway
    between the largest that fits and the smallest that does not. Yields a peer and its rows.

    tokens_s: decoded tokens of all rows per second. peak_bytes: beside the weights, with the cache; None on a CPU.
    A row with "failed" is a batch that was refused. Kernels are compiled before the time of `settings` begins.
    """
    for peer in peers:
        _at(model, peer, 1, settings)
    end = time.monotonic() + settings.seconds
    for number, peer in enumerate(peers):
        own_end = time.monotonic() + max(0.0, end - time.monotonic()) / (len(peers) - number)
        yield peer, list(_of_peer(model, peer, settings, own_end, step))


def _of_peer(
    model: PreTrainedModel, peer: Peer, settings: Growth, end: float, step: Callable[[], None]
) -> Iterator[dict]:
    fits, refused, halvings, batch = 0, None, HALVINGS, 1
    while fits < batch <= settings.most and batch != refused:
        row = _at(model, peer, batch, settings)
        step()
        yield row
        fits, refused = (fits, batch) if "failed" in row else (batch, refused)
        if time.monotonic() > end or (refused is not None and halvings == 0):
            break
        batch = 4 * batch if refused is None else (fits + refused) // 2
        halvings -= refused is not None


def _at(model: PreTrainedModel, peer: Peer, batch: int, settings: Growth) -> dict[str, Any]:
    about = {"peer": peer.name, "bits": peer.bits, "context": settings.context, "batch": batch}
    try:
        found = _decode(model, peer, batch, settings)
    except torch.OutOfMemoryError:
        found = {"failed": "out of memory"}
    if model.device.type == "cuda":
        gc.collect()  # an error holds the tensors of where it arose
        torch.cuda.empty_cache()
    return about | {"backend": peer.backend} | found


@torch.no_grad()
def _decode(model: PreTrainedModel, peer: Peer, batch: int, settings: Growth) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(settings.seed)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, settings.context + WARM_UP + settings.tokens), generator=generator).to(
        model.device
    )
    # Measuring memory on a CPU takes time from the tokens.
    measured = PeakMemory(model.device) if model.device.type == "cuda" else nullcontext()
    with peer.on(model) as new_cache, measured as peak:
        cache = new_cache(ids.shape[1])
        _forward(model, ids[:, : settings.context], cache)
        cache.batch_repeat_interleave(batch)
        seconds = [
            _forward(model, ids[:, at : at + 1].expand(batch, 1), cache) for at in range(settings.context, ids.shape[1])
        ][WARM_UP:]
        held = peer.nbytes(cache)
    return {
        "token_ms": round(1000 * sum(seconds) / len(seconds), 3),
        "tokens_s": round(batch * len(seconds) / sum(seconds), 2),
        "cache_bytes": held,
        "peak_bytes": peak and peak.bytes,
    }


def _forward(model: PreTrainedModel, ids: Tensor, cache: Cache) -> float:
    synchronize(model)
    start = time.perf_counter()
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    synchronize(model)
    return time.perf_counter() - start

"""How much a GPU decodes at once: throughput and peak memory at growing batch, until memory ends.

The prompt is read by one row, whose cache is then repeated to the batch: what is measured is decoding, and its memory.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

from kvq_cli.benchmarking.generate import synchronize
from kvq_cli.benchmarking.machine import PeakMemory
from kvq_cli.benchmarking.peers import Peer


@dataclass(frozen=True)
class Growth:
    """context: of the prompt. tokens: decoded at each batch, after one that is not counted. most: the largest batch."""

    context: int
    tokens: int
    most: int
    seed: int


def grow(model: PreTrainedModel, peers: Sequence[Peer], settings: Growth, step: Callable[[], None]) -> Iterator[dict]:
    """Rows of each peer at batches 1, 2, 4, ... up to the first that memory refuses, then halfway back once.

    tokens_s: decoded tokens of all rows per second. peak_bytes: beside the weights, with the cache. A row with "failed"
    is the batch that was refused.
    """
    for peer in peers:
        batch, refused = 1, None
        while batch <= settings.most:
            row = _at(model, peer, batch, settings)
            step()
            yield row
            if "failed" in row:
                refused = batch
                break
            batch *= 2
        if refused is not None and refused >= 4:
            yield _at(model, peer, 3 * refused // 4, settings)
            step()


def _at(model: PreTrainedModel, peer: Peer, batch: int, settings: Growth) -> dict[str, Any]:
    about = {"peer": peer.name, "bits": peer.bits, "context": settings.context, "batch": batch}
    try:
        found = _decode(model, peer, batch, settings)
    except torch.OutOfMemoryError:
        found = {"failed": "out of memory"}
    gc.collect()
    if model.device.type == "cuda":
        torch.cuda.empty_cache()
    return about | {"backend": peer.backend} | found


@torch.no_grad()
def _decode(model: PreTrainedModel, peer: Peer, batch: int, settings: Growth) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(settings.seed)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (1, settings.context + settings.tokens + 1), generator=generator).to(model.device)
    with peer.on(model) as new_cache, PeakMemory(model.device) as peak:
        cache = new_cache()
        _forward(model, ids[:, : settings.context], cache)
        cache.batch_repeat_interleave(batch)
        seconds = [
            _forward(model, ids[:, at : at + 1].expand(batch, 1), cache) for at in range(settings.context, ids.shape[1])
        ][1:]
        held = peer.nbytes(cache)
    return {
        "token_ms": round(1000 * sum(seconds) / len(seconds), 3),
        "tokens_s": round(batch * len(seconds) / sum(seconds), 2),
        "cache_bytes": held,
        "peak_bytes": peak.bytes,
    }


def _forward(model: PreTrainedModel, ids: Tensor, cache: Cache) -> float:
    synchronize(model)
    start = time.perf_counter()
    model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    synchronize(model)
    return time.perf_counter() - start

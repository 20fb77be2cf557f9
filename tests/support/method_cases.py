"""Every method with options for a tiny model, ready to attach."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from random_artifacts import random_parts

from kvq_cli.artifact import Artifact
from kvq_cli.cache.cache import CompressedCache
from kvq_cli.methods.registry import build

KIVI = {"group": 8, "residual": 16, "sinks": 3}
CASES = [
    ("fp16", {}),
    ("kivi", KIVI),
    ("kivi", {"bits": 3, "group": 4, "residual": 8, "pre_rope": True}),
    ("kivi", {**KIVI, "rotation": "hadamard"}),
    ("turboquant", {"sinks": 3, "recent": 5}),
    ("turboquant", {"bits": 3, "values": "lloyd_max", "value_bits": 4, "flip": True, "buffer": 4}),
    ("kvarn", {"bits": 4, "value_bits": 2, "group": 8, "sinks": 3, "recent": 5}),
    ("kvarn", {"bits": 3, "group": 16, "sinks": 0, "iterations": 4}),
    ("oscar-omni", KIVI),
    ("oscar-omni", {"group": 8, "sinks": 3, "recent": 5, "pre_rope": True}),
    ("oscar", {"sinks": 3, "recent": 5}),
    ("oscar", {"bits": 4, "group": 8, "sinks": 0, "recent": 0, "buffer": 4}),
    ("llama-cpp", {"sinks": 3, "recent": 5}),
    ("llama-cpp", {"bits": 8, "buffer": 4}),
    ("per-token-head", {"sinks": 3, "recent": 5}),
    ("per-token-head", {"bits": 8, "buffer": 4}),
    ("quanto", {"bits": 2, "group": 8, "sinks": 3, "recent": 5, "buffer": 4}),
    ("gear", {"bits": 2, "group": 8, "residual": 16, "sinks": 3, "recent": 5, "outliers": 0.05}),
    ("gear", {"bits": 4, "group": 8, "residual": 8, "rank": 0, "chunk_rank": 2, "outliers": 0.05}),
    ("zipcache", {"residual": 15, "sinks": 3, "recent": 5}),
    ("zipcache", {"residual": 10, "ratio": 0.0}),
    ("squat", {**KIVI, "block": 4}),
    ("squat", {**KIVI, "block": 4, "shared_svd": True, "pre_rope": True}),
    ("innerq", {"group": 16, "sinks": 3, "recent": 5}),
    ("innerq", {"group": 16, "sinks": 3, "recent": 5, "mode": "hybrid_prefill", "buffer": 3}),
    ("innerq", {"group": 16, "sinks": 3, "recent": 5, "mode": "symmetric", "sign": "inside", "norm": False}),
    ("kvquant", {"bits": 2, "sinks": 3, "recent": 4, "outliers": 0.05}),
    ("channelkv", {"bits": 4, "sinks": 3}),
    ("channelkv", {"bits": 4, "sinks": 3, "rotation": "opq"}),
    ("channelkv", {"bits": 4, "sinks": 3, "entries": 65536}),
    ("temporalkv", {"bits": 4, "sinks": 3, "hybrid": "head", "outliers": 0.05}),
    ("temporalkv", {"bits": 2, "sinks": 3, "recent": 6}),
    ("klt", {"bits": 2, "sinks": 3, "recent": 5, "join_keys": True}),
    (
        "mixed",
        {"bits": 9, "keys": "kivi-2bit:group=16 klt-2bit", "values": "temporalkv-4bit fp16", "sinks": 3, "recent": 5},
    ),
    ("kvtc", {"bits": 4, "sinks": 3, "recent": 5, "buffer": 4, "deflate": False}),
    ("kvtc", {"bits": 2, "sinks": 0, "recent": 16, "buffer": 3}),
    ("xquant", {"bits": 4, "group": 8, "sinks": 3, "first_channel": True}),
    ("palu", {"bits": 4, "sinks": 3, "recent": 5, "heads": 1}),
    ("palu", {"bits": 16, "share": 1.0, "buffer": 4}),
    ("xquant-cl", {"bits": 4, "group": 8, "base_layers": 1}),
    ("xquant-cl", {"bits": 4, "group": 8, "base_layers": 2, "recent": 3, "accumulator_bits": 4}),
]
#: Tokens of the document, of the question and in all, of the longer row; neither fills a block.
DOCUMENT, QUESTION, ALL = 75, 7, 101

each_method = pytest.mark.parametrize(
    ("name", "options"), CASES, ids=[f"{name}-{index}" for index, (name, _) in enumerate(CASES)]
)


def ready(name: str, options: dict, model):
    """The method, or an artifact of random numbers."""
    method = build(name, **{"sinks": 3, **options} if name == "kivi" else options)
    if not method.calibrates:
        return method
    config, tensors = random_parts(method, model)
    return Artifact({**config, "checksum": "of " + name}, tensors, Path("nowhere"))


class Run:
    """A left-padded batch of two rows that is given to a cache in passes; the tokens are the same for all caches."""

    def __init__(self, model, rows: int = 2) -> None:
        self.model = model
        self.ids = torch.randint(3, 40, (rows, ALL), generator=torch.Generator().manual_seed(1))
        self.mask = torch.ones_like(self.ids)
        self.mask[0, :11] = rows == 1

    def feed(self, cache: CompressedCache, start: int, stop: int) -> torch.Tensor:
        seen = self.mask[:, :stop]
        positions = (seen.cumsum(1) - 1).clamp(min=0)[:, start:]
        ids = self.ids[:, start:stop]
        return self.model(ids, attention_mask=seen, position_ids=positions, past_key_values=cache).logits

    def continued(self, cache: CompressedCache, start: int = DOCUMENT) -> torch.Tensor:
        """The logits of a question of several tokens, and of tokens decoded after it one by one."""
        logits = [self.feed(cache, start, start + QUESTION)]
        logits += [self.feed(cache, at, at + 1) for at in range(start + QUESTION, ALL)]
        return torch.cat(logits, dim=1)


def held(cache: CompressedCache) -> dict[str, torch.Tensor]:
    """All numbers that a cache holds, by name."""
    return {
        f"{layer.index}.{number}.{name}": tensor.clone()
        for layer in cache.layers
        for number, stream in enumerate(layer.streams)
        for name, tensor in stream.snapshot().tensors().items()
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

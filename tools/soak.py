"""Decode a long sequence and compare, at checkpoints, the cache with `kvq plan`'s count and with the process's memory.

    python tools/soak.py [--tokens 20000] [--context 131072] [--methods kivi,temporalkv,innerq]

Runs the built-in model, whose context is extended: its answers mean nothing there, its cache is what a model of this
shape has. Fails where the cache differs from the count by more than 1 %, the process's memory grows beside the cache,
or the time per token grows faster than the number of tokens read. Then fills one layer with a long context of random
keys and values, and fails where it takes more than 5 % beside what `kvq plan` says, room for later tokens included.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from kvq_cli.attention.attach import attach
from kvq_cli.attention.rotary import Rotation
from kvq_cli.benchmarking.accounting import account
from kvq_cli.benchmarking.synthetic import artifact_tensors, random_artifact
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.cache.report import report
from kvq_cli.cache.rows import Rows
from kvq_cli.cache_argument import cache_argument
from kvq_cli.methods.registry import build
from kvq_cli.models import load_model

#: Tokens of a pass between checkpoints. Single tokens take several times as long, and leave the same cache.
CHUNK = 16
#: Single tokens that are timed at a checkpoint.
TIMED = 8
#: Bytes by which the process may grow beside the cache: workspaces of attention, the allocator's free blocks.
SPARE = 24 << 20


@dataclass(frozen=True)
class Checkpoint:
    """After `tokens` tokens: bytes of the cache in use and as counted by `kvq plan`, bytes allocated for later tokens,
    resident bytes of the process, and CPU seconds of a decode step (the median)."""

    tokens: int
    cache: int
    counted: int
    unused: int
    resident: int
    step: float


@torch.no_grad()
def soak(name: str, tokens: int, checkpoints: int = 5) -> list[Checkpoint]:
    """Decode `tokens` tokens with the method at its default bits; `checkpoints` measurements, evenly spaced."""
    loaded = load_model("reference", "cpu")
    loaded.model.config.max_position_embeddings = 2 * tokens
    method, ids = build(name), torch.randint(10, 4000, (1, tokens), generator=torch.Generator().manual_seed(0))
    artifact = random_artifact(method, loaded.model, "reference", 0) if method.needs_artifact(loaded.shape) else method
    measured, every = [], tokens // checkpoints
    with attach(loaded.model, artifact, prefill="compressed") as kv:
        cache, done = kv.new_cache(), 0
        while done < tokens:
            until_next = every - done % every
            size = CHUNK if until_next > TIMED + CHUNK else max(1, until_next - TIMED)
            if until_next > TIMED:
                loaded.model(ids[:, done : done + size], **cache_argument(cache), logits_to_keep=1)
                done += size
                continue
            steps = []
            for _ in range(TIMED):
                started = time.process_time()
                loaded.model(ids[:, done : done + 1], **cache_argument(cache))
                steps.append(time.process_time() - started)
                done += 1
            counted, held = account(method, loaded.shape, done), cache.report()
            sizes = [report.bytes - report.parts.get("unused", 0) for report in (held, counted)]
            step = sorted(steps)[TIMED // 2]
            measured.append(Checkpoint(done, *sizes, held.parts.get("unused", 0), _resident(), step))
    return measured


def failures(measured: list[Checkpoint]) -> list[str]:
    """What does not hold of a soak: see the top of this file."""
    found = [
        f"{point.tokens} tokens: the cache has {point.cache} bytes, kvq plan counts {point.counted}"
        for point in measured
        if abs(point.cache - point.counted) > 0.01 * point.counted
    ]
    first, last = measured[1], measured[-1]  # by the second one, all workspaces are there
    beside = (last.resident - first.resident) - (last.cache + last.unused - first.cache - first.unused)
    if beside > SPARE:
        found.append(f"the process grew by {beside} bytes beside the cache from {first.tokens} to {last.tokens} tokens")
    if last.step > 1.3 * first.step * last.tokens / first.tokens:
        found.append(f"a step takes {first.step:.4f} s at {first.tokens} tokens, {last.step:.4f} s at {last.tokens}")
    return found


def filled(name: str, context: int) -> tuple[int, int]:
    """Bytes of one layer after `context` tokens, of which the last ones came one block at a time, and as counted."""
    shape = replace(load_model("reference", "cpu").shape, layers=1)
    method, noise = build(name), torch.Generator().manual_seed(0)
    tensors = {key: _like(key, tensor, noise) for key, tensor in artifact_tensors(method, shape, 0).items()}
    tensors = {key.removeprefix("layers.0."): tensor for key, tensor in tensors.items()}
    layer = CompressedLayer(0, method.plan(0, shape, tensors), Rotation("none", torch.empty(0), shape.head_dim))
    rows, past = Rows(), 0
    while past < context:
        tokens = min(2048 if past < context - 4096 else 32, context - past)
        keys, queries = (
            torch.randn(1, heads, tokens, shape.head_dim, generator=noise).to(shape.torch_dtype)
            for heads in (shape.kv_heads, shape.query_heads)
        )
        layer.begin(rows.begin(past, tokens, 1))
        layer.capture_key(keys)
        layer.update(keys, keys)
        layer.absorb(queries)
        layer.release()
        past += tokens
    return report([layer], method.nominal_bits).bytes, account(method, shape, context).bytes


def _like(name: str, tensor: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
    """Random numbers in the place of a calibrated tensor; block shapes are the first of those allowed."""
    if not tensor.dtype.is_floating_point:
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    drawn = torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
    return drawn.abs() + 1 if name.endswith(".std") else drawn


def _resident() -> int:
    """Resident bytes of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--context", type=int, default=131_072)
    parser.add_argument("--methods", default="kivi,temporalkv,innerq")
    arguments = parser.parse_args()
    wrong = []
    for name in arguments.methods.split(","):
        measured = soak(name, arguments.tokens)
        print(json.dumps({name: [asdict(point) for point in measured]}), flush=True)
        wrong += [f"{name}: {text}" for text in failures(measured)]
        held, counted = filled(name, arguments.context)
        print(json.dumps({name: {"context": arguments.context, "held": held, "counted": counted}}), flush=True)
        if abs(held - counted) > 0.05 * counted:
            wrong.append(f"{name}: {arguments.context} tokens take {held} bytes, kvq plan counts {counted}")
    print("\n".join(wrong) or "all hold", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

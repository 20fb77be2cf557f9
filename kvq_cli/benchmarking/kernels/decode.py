"""Decode attention of every storage family at Llama-3.1-8B's shape, beside 16 bits: KERNELS.md's grid of targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from kvq_kernels.decode_attention import Rope, Side, Workspace, aot_cases, decode_attention
from kvq_kernels.decode_attention.kernel import TAIL_COST
from kvq_kernels.decode_attention.reference import decode_attention_reference
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvq_cli.benchmarking.kernels.experiment import Case, Sizes, generator, random_tensor, relative_error

SHAPES = [(1, 4096), (1, 32768), (8, 4096), (1, 131072), (8, 32768), (8, 131072)]
DRY_SHAPES = [(1, 256)]
CHECKED_SHAPES = [(1, 512)]
DRY_STORES = ("fp16", "kivi-2bit-g32", "temporal-2bit")
#: Newest tokens that are not packed; all others are, except for the sinks.
RECENT = 96
#: Where a long tail of unpacked tokens is timed, too: what one of them costs is `TAIL_COST` of the kernel.
TAIL_SHAPE, TAIL = (1, 32768), 1120
TAIL_STORES = ("kivi-2bit-g32", "innerq-2bit", "temporal-2bit", "kvquant-2bit")
#: Tensors of a store with one line per row of the batch and token (or group of tokens); others are constants.
PER_TOKEN = {"numbers", "codes", "scale", "zero", "sign", "token_scale", "token_zero"}
BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}


class DecodeAttention:
    """softmax(q K^T) V of one query per row; what is compared with: PyTorch's attention in all its ways, and kvq's own
    kernel over 16-bit numbers."""

    operation = "decode_attention"
    tuned_at = SHAPES.index((1, 131072))

    def groups(self, sizes: Sizes, device: torch.device) -> Iterator[tuple[dict[str, Any], list[Case]]]:
        stores = [name for name in aot_cases.storage_cases() if not sizes.dry or name in DRY_STORES]
        heads = sizes.pick(aot_cases.HEADS, 1)
        for batch, context in sizes.pick(SHAPES, DRY_SHAPES, CHECKED_SHAPES):
            shape = Shape(batch, heads, context, device)
            cases = _plain_cases(shape) + [_case(name, shape) for name in stores]
            if (batch, context) == TAIL_SHAPE and not (sizes.dry or sizes.small):
                cases += [_tail_case(name, shape) for name in TAIL_STORES]
            yield {"batch": batch, "context": context}, cases


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    context: int
    device: torch.device

    def of(self, name: str, x: Tensor) -> tuple[int, ...]:
        """A shipped store's tensor as it is at this shape."""
        size = list(x.shape)
        if name in PER_TOKEN:
            size[0], size[2] = self.batch, size[2] * self.context // aot_cases.TOKENS
        heads = 1 if name in PER_TOKEN else 0
        size[heads] = min(size[heads], self.heads)
        return tuple(size)


def _case(name: str, shape: Shape) -> Case:
    def make(seed: int) -> Callable[[], Tensor]:
        query, keys, values, lengths, rope = store(name, shape, seed)
        out, scaling, options = torch.empty_like(query), query.shape[2] ** -0.5, {"rope": rope, "backend": "triton"}
        return lambda: decode_attention(query, keys, values, lengths, scaling, out=out, **options)

    def error() -> tuple[float, float]:
        query, *sides, lengths, rope = store(name, shape, 0)
        scaling = query.shape[2] ** -0.5
        exact, plain = (
            decode_attention_reference(query, *sides, lengths, scaling, rope, dtype, held)
            for dtype, held in ((torch.float64, None), (torch.float32, query.dtype))
        )
        floor = torch.finfo(query.dtype).eps / 4
        allowed = 2 * max(relative_error(plain.to(query.dtype), exact), floor)
        workspace = Workspace.like(query, 2)
        found = decode_attention(query, *sides, lengths, scaling, rope=rope, workspace=workspace, backend="triton")
        return relative_error(found, exact), allowed

    keys, values, rope = aot_cases.storage_cases()[name]
    held = sum(_held(side, shape) for side in (keys, values))
    baseline = name == "fp16"
    return Case(f"kvq {name}", make, held, baseline, error, {"store": name})


def _tail_case(name: str, shape: Shape) -> Case:
    """A store whose `TAIL` newest tokens are not packed; timed only."""

    def make(seed: int) -> Callable[[], Tensor]:
        query, keys, values, lengths, rope = store(name, shape, seed, TAIL)
        out, scaling = torch.empty_like(query), query.shape[2] ** -0.5
        return lambda: decode_attention(query, keys, values, lengths, scaling, out=out, rope=rope, backend="triton")

    held = sum(_held(side, shape) for side in aot_cases.storage_cases()[name][:2])
    tail = {"added": TAIL - RECENT, "assumed": TAIL_COST.value}
    return Case(f"kvq {name}, tail of {TAIL}", make, held, about={"store": name, "tail": tail})


def store(name: str, shape: Shape, seed: int, recent: int = RECENT) -> tuple[Tensor, Side, Side, Tensor, Rope | None]:
    """query, keys, values, lengths, rope: a shipped store of random numbers, whose `recent` tokens are not packed."""
    random = generator(shape.device, seed)
    *sides, rope = aot_cases.storage_cases()[name]
    sides = [_filled(side, shape, random, recent) for side in sides]
    query = random_tensor((shape.batch, shape.heads * aot_cases.GROUP, aot_cases.DIM), torch.float16, random)
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=shape.device)
    if rope is not None:
        half = rope.frequencies.numel()
        frequencies = 500000.0 ** (-torch.arange(half, device=shape.device) / half)
        rope = Rope.tables(rope.style, frequencies, shape.context + Rope.STEP)
    return query, *sides, lengths, rope


def _tensors(side: Side) -> dict[str, Tensor]:
    found = {one.name: getattr(side.packed, one.name) for one in fields(side.packed)}
    return {name: x for name, x in found.items() if isinstance(x, Tensor)}


def _filled(side: Side, shape: Shape, random: torch.Generator, recent: int) -> Side:
    held = {name: random_tensor(shape.of(name, x), x.dtype, random) for name, x in _tensors(side).items()}
    held |= {name: held[name].abs() for name in held if name == "scale"}  # a negative one says hybrid
    windows = [
        random_tensor((shape.batch, shape.heads, *x.shape[2:]), x.dtype, random) for x in (side.sinks, side.ring)
    ]
    packed = shape.context - side.sinks.shape[2] - recent
    count = torch.full((shape.batch,), packed, dtype=torch.int32, device=shape.device)
    return Side(replace(side.packed, **held), count, *windows)


def _held(side: Side, shape: Shape) -> int:
    """Bytes of a side that a step reads; codebooks and such once, in whatever cache they stay."""
    return sum(math.prod(shape.of(name, x)) * x.element_size() for name, x in _tensors(side).items())


def _plain_cases(shape: Shape) -> list[Case]:
    """PyTorch's attention, with query heads beside each other and as several queries of their kv head."""
    nbytes = 2 * 2 * shape.batch * shape.heads * shape.context * aot_cases.DIM
    cases = []
    for name, backend in BACKENDS.items():
        if shape.device.type == "cpu" and backend is not SDPBackend.MATH:
            continue
        for grouped in (False, True):
            make = partial(_plain, shape, backend, grouped)
            cases.append(Case(name + (", heads as queries" if grouped else ""), make, nbytes, True))
    return cases


def _plain(shape: Shape, backend: SDPBackend, grouped: bool, seed: int) -> Callable[[], Tensor]:
    random = generator(shape.device, seed)
    size = (
        (shape.batch, shape.heads, aot_cases.GROUP, aot_cases.DIM)
        if grouped
        else (shape.batch, shape.heads * aot_cases.GROUP, 1, aot_cases.DIM)
    )
    query = random_tensor(size, torch.float16, random)
    held = (shape.batch, shape.heads, shape.context, aot_cases.DIM)
    keys, values = (random_tensor(held, torch.float16, random) for _ in range(2))

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values, enable_gqa=not grouped)

    return call

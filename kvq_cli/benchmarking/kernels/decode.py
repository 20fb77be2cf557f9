"""Decode attention of every storage family at Llama-3.1-8B's shape, beside 16-bit attention: the grid of KERNELS.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import torch
from kvq_kernels.decode_attention import PerHead, Rope, Side, Workspace, aot_cases, decode_attention
from kvq_kernels.decode_attention.kernel import EXACT_COST
from kvq_kernels.decode_attention.reference import decode_attention_reference
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kvq_cli.benchmarking.kernels.experiment import Case, Sizes, generator, random_tensor, relative_error

#: Pairs (batch, context).
SHAPES = [(1, 4096), (1, 32768), (8, 4096), (1, 131072), (8, 32768), (8, 131072)]
DRY_SHAPES = [(1, 256)]
CHECKED_SHAPES = [(1, 512)]
DRY_STORES = ("fp16", "kivi-2bit-g32", "temporal-2bit", "turboquant-4bit")
#: Unpacked tokens of the residual window; all older ones but the sinks are packed.
RECENT = 96
#: Where many exact tokens are timed, to measure the kernel's `EXACT_COST`: the time of one.
TAIL_SHAPE, TAIL = (1, 32768), 1120
TAIL_STORES = ("kivi-2bit-g32", "innerq-2bit", "temporal-2bit", "kvquant-2bit")
#: Tensors of a store with an entry per sequence and token (or group of tokens); the others are constants.
PER_TOKEN = {"numbers", "codes", "scale", "zero", "sign", "token_scale", "token_zero", "norm"}
BACKENDS = {
    "sdpa flash": SDPBackend.FLASH_ATTENTION,
    "sdpa cudnn": SDPBackend.CUDNN_ATTENTION,
    "sdpa efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa math": SDPBackend.MATH,
}


class DecodeAttention:
    """softmax(q K^T) V of one query per sequence. Baselines: all backends of PyTorch's attention, and kvq's kernel over
    16-bit keys and values."""

    operation = "decode_attention"
    tuned_at = SHAPES.index((1, 131072))

    def shapes(self, sizes: Sizes, device: torch.device) -> Iterator[tuple[dict[str, Any], list[Case]]]:
        stores = [name for name in aot_cases.storage_cases() if not sizes.dry or name in DRY_STORES]
        heads = sizes.pick(aot_cases.HEADS, 1)
        for batch, context in sizes.pick(SHAPES, DRY_SHAPES, CHECKED_SHAPES):
            shape = DecodeShape(batch, heads, context, device)
            cases = sdpa_cases(shape) + [_case(name, shape) for name in stores]
            if (batch, context) == TAIL_SHAPE and not (sizes.dry or sizes.small):
                cases += [_tail_case(name, shape) for name in TAIL_STORES]
            yield {"batch": batch, "context": context}, cases


@dataclass(frozen=True)
class DecodeShape:
    """Batch size, kv heads and context of a decode step."""

    batch: int
    heads: int
    context: int
    device: torch.device

    def resize(self, name: str, x: Tensor) -> tuple[int, ...]:
        """Return the shape of a shipped store's tensor `name` at this batch, number of heads and context."""
        size = list(x.shape)
        if name in PER_TOKEN:
            size[0], size[2] = self.batch, size[2] * self.context // aot_cases.TOKENS
        if len(size) > 1:  # else it is of all heads
            heads = 1 if name in PER_TOKEN else 0
            size[heads] = min(size[heads], self.heads)
        return tuple(size)


@dataclass(frozen=True)
class DecodeStep:
    """The operands of `decode_attention` for one decode step."""

    query: Tensor
    keys: Side
    values: Side
    lengths: Tensor
    rope: Rope | None

    def run(self, out: Tensor | None = None, workspace: Workspace | None = None) -> Tensor:
        """Compute attention with the Triton kernel."""
        return decode_attention(
            self.query,
            self.keys,
            self.values,
            self.lengths,
            self.scaling,
            rope=self.rope,
            workspace=workspace,
            out=out,
            backend="triton",
        )

    def reference(self, dtype: torch.dtype, round_to: torch.dtype | None = None) -> Tensor:
        """Compute attention with PyTorch in `dtype`; keys and values rounded to `round_to`."""
        return decode_attention_reference(
            self.query, self.keys, self.values, self.lengths, self.scaling, self.rope, dtype, round_to
        )

    @property
    def scaling(self) -> float:
        """The factor of q . k: 1 / sqrt(head_dim)."""
        return self.query.shape[2] ** -0.5


def _case(name: str, shape: DecodeShape) -> Case:
    error = partial(_error, name, shape)
    return Case(
        f"kvq {name}", _maker(name, shape, RECENT), _nbytes(name, shape), name == "fp16", error, {"store": name}
    )


def _tail_case(name: str, shape: DecodeShape) -> Case:
    """A store whose newest `TAIL` tokens are not packed; timed only."""
    tail = {"added": TAIL - RECENT, "assumed": EXACT_COST.value}
    make = _maker(name, shape, TAIL)
    return Case(f"kvq {name}, tail of {TAIL}", make, _nbytes(name, shape), extra={"store": name, "tail": tail})


def _maker(name: str, shape: DecodeShape, recent: int) -> Callable[[int], Callable[[], Tensor]]:
    def make(seed: int) -> Callable[[], Tensor]:
        step = random_decode_step(name, shape, seed, recent)
        return partial(step.run, torch.empty_like(step.query))

    return make


def _error(name: str, shape: DecodeShape) -> tuple[float, float]:
    """Return the kernel's relative error and its limit, twice the error of PyTorch in float32."""
    step = random_decode_step(name, shape, 0)
    dtype = step.query.dtype
    exact, rounded = step.reference(torch.float64), step.reference(torch.float32, dtype).to(dtype)
    return relative_error(step.run(workspace=Workspace.like(step.query, 2)), exact), allowed_error(rounded, exact)


def allowed_error(rounded: Tensor, exact: Tensor) -> float:
    """Return twice the relative error of `rounded`, PyTorch's result, or of rounding alone."""
    return 2 * max(relative_error(rounded, exact), torch.finfo(rounded.dtype).eps / 4)


def random_decode_step(name: str, shape: DecodeShape, seed: int, recent: int = RECENT) -> DecodeStep:
    """Return a decode step over a shipped store of random numbers, whose newest `recent` tokens are not packed."""
    random = generator(shape.device, seed)
    *sides, rope = aot_cases.storage_cases()[name]
    keys, values = (_random_side(side, shape, random, recent) for side in sides)
    query = random_tensor((shape.batch, shape.heads * aot_cases.GROUP, aot_cases.DIM), torch.float16, random)
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=shape.device)
    if rope is not None:
        rope = rope_tables(rope.style, rope.frequencies.numel(), shape)
    return DecodeStep(query, keys, values, lengths, rope)


def rope_tables(style: Literal["half", "interleaved"], half: int, shape: DecodeShape) -> Rope:
    """Return Llama 3's RoPE of `2 * half` channels, for all positions of the context."""
    frequencies = 500000.0 ** (-torch.arange(half, dtype=torch.float32, device=shape.device) / half)
    return Rope.tables(style, frequencies, shape.context + Rope.STEP)


def _tensors(side: Side) -> dict[str, Tensor]:
    """Return the tensors of the packed part by field name."""
    parts = {field.name: getattr(side.packed, field.name) for field in fields(side.packed)}
    return {name: x for name, x in parts.items() if isinstance(x, Tensor)}


def _random_side(side: Side, shape: DecodeShape, random: torch.Generator, recent: int) -> Side:
    assert side.sinks is not None and side.ring is not None and not isinstance(side.packed, PerHead)
    tensors: dict[str, Any] = {
        name: random_tensor(shape.resize(name, x), x.dtype, random) for name, x in _tensors(side).items()
    }
    for name in {"scale", "norm"} & tensors.keys():
        tensors[name] = tensors[name].abs()  # in a hybrid, a negative scale marks an asymmetric group
    sinks, ring = (
        random_tensor((shape.batch, shape.heads, *x.shape[2:]), x.dtype, random) for x in (side.sinks, side.ring)
    )
    packed = shape.context - side.sinks.shape[2] - recent
    count = torch.full((shape.batch,), packed, dtype=torch.int32, device=shape.device)
    return Side(replace(side.packed, **tensors), count, sinks, ring)


def _nbytes(name: str, shape: DecodeShape) -> int:
    """Return the bytes of keys and values that a decode step reads; constants such as codebooks count once."""
    keys, values, _ = aot_cases.storage_cases()[name]
    return sum(
        math.prod(shape.resize(part, x)) * x.element_size()
        for side in (keys, values)
        for part, x in _tensors(side).items()
    )


def sdpa_cases(shape: DecodeShape) -> list[Case]:
    """Return the cases of PyTorch's attention, with query heads as heads, and as several queries of their kv head."""
    nbytes = 2 * 2 * shape.batch * shape.heads * shape.context * aot_cases.DIM
    cases = []
    for name, backend in BACKENDS.items():
        if shape.device.type == "cpu" and backend is not SDPBackend.MATH:
            continue
        for grouped in (False, True):
            make = partial(_sdpa, shape, backend, grouped)
            cases.append(Case(name + (", heads as queries" if grouped else ""), make, nbytes, True))
    return cases


def _sdpa(shape: DecodeShape, backend: SDPBackend, grouped: bool, seed: int) -> Callable[[], Tensor]:
    random = generator(shape.device, seed)
    size = (
        (shape.batch, shape.heads, aot_cases.GROUP, aot_cases.DIM)
        if grouped
        else (shape.batch, shape.heads * aot_cases.GROUP, 1, aot_cases.DIM)
    )
    query = random_tensor(size, torch.float16, random)
    cached = (shape.batch, shape.heads, shape.context, aot_cases.DIM)
    keys, values = (random_tensor(cached, torch.float16, random) for _ in range(2))

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values, enable_gqa=not grouped)

    return call

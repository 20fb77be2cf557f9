"""klt's decode attention, over codes of a transform's components, beside 16-bit attention at Llama-3.1-8B's shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from kvq_kernels.decode_attention import Dense, Rope, Side
from kvq_kernels.decode_attention import aot_cases as decode_cases
from kvq_kernels.transform_attention import Transform, Transformed, aot_cases, make_steps, transform_attention
from kvq_kernels.transform_attention.reference import transform_attention_reference
from torch import Tensor

from kvq_cli.benchmarking.kernels.decode import (
    CHECKED_SHAPES,
    DRY_SHAPES,
    SHAPES,
    DecodeShape,
    allowed_error,
    rope_tables,
    sdpa_cases,
)
from kvq_cli.benchmarking.kernels.experiment import Case, Sizes, generator, random_tensor, relative_error

#: Whether keys have one transform of all heads, by case. Values always have.
JOINED_KEYS = {"klt-2bit": False, "klt-2bit, joined keys": True}
#: klt's default window; `RECENT` of the tokens that it packs next are there.
SINKS, RING, RECENT = 8, 8, 4


class TransformAttention:
    """softmax(q K^T) V of one query per sequence. Baselines: all backends of PyTorch's attention."""

    operation = "transform_attention"
    tuned_at = SHAPES.index((1, 131072))

    def shapes(self, sizes: Sizes, device: torch.device) -> Iterator[tuple[dict[str, Any], list[Case]]]:
        heads = sizes.pick(decode_cases.HEADS, 1)
        names = list(JOINED_KEYS)[: sizes.pick(2, 1)]  # the same of one head
        for batch, context in sizes.pick(SHAPES, DRY_SHAPES, CHECKED_SHAPES):
            shape = DecodeShape(batch, heads, context, device)
            yield {"batch": batch, "context": context}, sdpa_cases(shape) + [_case(name, shape) for name in names]


@dataclass(frozen=True)
class TransformStep:
    """The operands of `transform_attention` for one decode step."""

    query: Tensor
    keys: Transformed
    values: Transformed
    lengths: Tensor
    rope: Rope

    @property
    def arguments(self) -> tuple[Tensor, Transformed, Transformed, Tensor, float]:
        """query, keys, values, lengths and the factor of q . k: 1 / sqrt(head_dim)."""
        return self.query, self.keys, self.values, self.lengths, self.query.shape[2] ** -0.5

    def run(self, out: Tensor | None = None) -> Tensor:
        """Compute attention with the Triton kernels."""
        return transform_attention(*self.arguments, rope=self.rope, out=out, backend="triton")

    def reference(self, dtype: torch.dtype, round_to: torch.dtype | None = None) -> Tensor:
        """Compute attention with PyTorch in `dtype`; keys and values rounded to `round_to`."""
        return transform_attention_reference(*self.arguments, rope=self.rope, dtype=dtype, round_to=round_to)


def _case(name: str, shape: DecodeShape) -> Case:
    make, error = partial(_make, name, shape), partial(_error, name, shape)
    tensors = [*_tensors(JOINED_KEYS[name], shape).values(), *_tensors(True, shape).values()]
    nbytes = sum(math.prod(size) * dtype.itemsize for size, dtype in tensors)
    return Case(f"kvq {name}", make, nbytes, error=error, extra={"store": name})


def _make(name: str, shape: DecodeShape, seed: int) -> Callable[[], Tensor]:
    step = random_transform_step(name, shape, seed)
    return partial(step.run, torch.empty_like(step.query))


def _error(name: str, shape: DecodeShape) -> tuple[float, float]:
    """Return the kernel's relative error and its limit, twice the error of PyTorch in float32."""
    step = random_transform_step(name, shape, 0)
    exact, rounded = step.reference(torch.float64), step.reference(torch.float32, step.query.dtype)
    return relative_error(step.run(), exact), allowed_error(rounded.to(step.query.dtype), exact)


def random_transform_step(name: str, shape: DecodeShape, seed: int) -> TransformStep:
    """Return a decode step over random codes, transforms, sinks and recent tokens."""
    random = generator(shape.device, seed)
    keys, values = (_random_side(joined, shape, random) for joined in (JOINED_KEYS[name], True))
    query = random_tensor((shape.batch, shape.heads * decode_cases.GROUP, decode_cases.DIM), torch.float16, random)
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=shape.device)
    return TransformStep(query, keys, values, lengths, rope_tables("half", decode_cases.DIM // 2, shape))


def _tensors(joined: bool, shape: DecodeShape) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of all tensors that a step reads of keys or values, which are packed but for a few."""
    codes, dim = sum(aot_cases.PER_HEAD.values()), decode_cases.DIM
    components = sum(size * number for size, number in aot_cases.PER_HEAD.items()) * shape.heads
    return {
        "codes": ((shape.batch, 1, shape.context, codes * shape.heads), torch.uint8),
        "centroids": ((components, 256), torch.float16),
        "synthesis": ((dim * components * (shape.heads if joined else 1),), torch.float32),
        "mean": ((shape.heads, dim), torch.float32),
    }


def _random_side(joined: bool, shape: DecodeShape, random: torch.Generator) -> Transformed:
    tensors = {name: random_tensor(size, dtype, random) for name, (size, dtype) in _tensors(joined, shape).items()}
    components = tensors["centroids"].shape[0]
    groups = 1 if joined else shape.heads
    channels = decode_cases.DIM * shape.heads // groups
    chunks = {size: [number * shape.heads // groups] * groups for size, number in aot_cases.PER_HEAD.items()}
    # Numbers of variance 2: a sum over the components of a group, and the mean.
    synthesis = tensors["synthesis"] / (components // groups) ** 0.5
    steps = make_steps(chunks, channels, shape.device)
    transform = Transform(tensors["centroids"], synthesis, tensors["mean"], steps)
    sinks, ring = (
        random_tensor((shape.batch, shape.heads, tokens, decode_cases.DIM), torch.float16, random)
        for tokens in (SINKS, RING)
    )
    packed = shape.context - SINKS - RECENT
    count = torch.full((shape.batch,), packed, dtype=torch.int32, device=shape.device)
    return Transformed(tensors["codes"], transform, Side(Dense(ring), count, sinks, ring))

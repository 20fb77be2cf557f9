"""klt's decode attention, over codes of a transform's components, beside 16-bit attention at Llama-3.1-8B's shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from kvq_kernels.aot_cases import stored_bytes
from kvq_kernels.decode_attention import Rope, Side
from kvq_kernels.decode_attention import aot_cases as decode_cases
from kvq_kernels.decode_attention.reference import decode_attention_reference
from kvq_kernels.transform_attention import Transform, Transformed, aot_cases, transform_attention
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

#: Stores by case: those that are compiled ahead of time.
STORES = {f"klt-{name}": aot_cases.SHAPES[name] for name in ("2bit", "4bit")}
#: klt's default window; `RECENT` of the tokens that it packs next are there.
SINKS, RING, RECENT = 8, 32, 8


class TransformAttention:
    """softmax(q K^T) V of one query per sequence. Baselines: all backends of PyTorch's attention."""

    operation = "transform_attention"
    tuned_at = SHAPES.index((1, 131072))

    def shapes(self, sizes: Sizes, device: torch.device) -> Iterator[tuple[dict[str, Any], list[Case]]]:
        heads = sizes.pick(decode_cases.HEADS, 1)
        for batch, context in sizes.pick(SHAPES, DRY_SHAPES, CHECKED_SHAPES):
            shape = DecodeShape(batch, heads, context, device)
            yield {"batch": batch, "context": context}, sdpa_cases(shape) + [_case(name, shape) for name in STORES]


@dataclass(frozen=True)
class TransformStep:
    """The operands of `transform_attention` for one decode step."""

    query: Tensor
    keys: Side
    values: Side
    lengths: Tensor
    rope: Rope

    @property
    def arguments(self) -> tuple[Tensor, Side, Side, Tensor, float]:
        """query, keys, values, lengths and the factor of q . k: 1 / sqrt(head_dim)."""
        return self.query, self.keys, self.values, self.lengths, self.query.shape[2] ** -0.5

    def run(self, out: Tensor | None = None) -> Tensor:
        """Compute attention with the Triton kernels."""
        return transform_attention(*self.arguments, rope=self.rope, out=out, backend="triton")

    def reference(self, dtype: torch.dtype, round_to: torch.dtype | None = None) -> Tensor:
        """Compute attention with PyTorch in `dtype`; keys and values rounded to `round_to`."""
        return decode_attention_reference(*self.arguments, rope=self.rope, dtype=dtype, round_to=round_to)


def _case(name: str, shape: DecodeShape) -> Case:
    make, error = partial(_make, name, shape), partial(_error, name, shape)
    nbytes = sum(map(_nbytes, _empty_sides(name, shape)))
    return Case(f"kvq {name}", make, nbytes, error=error, extra={"store": name})


def _make(name: str, shape: DecodeShape, seed: int) -> Callable[[], Tensor]:
    step = random_transform_step(name, shape, seed)
    return partial(step.run, torch.empty_like(step.query))


def _error(name: str, shape: DecodeShape) -> tuple[float, float]:
    """Return the kernel's relative error and its limit, four times the error of PyTorch in float32: a key is rounded
    several times to 16 bits."""
    step = random_transform_step(name, shape, 0)
    exact, rounded = step.reference(torch.float64), step.reference(torch.float32, step.query.dtype)
    return relative_error(step.run(), exact), 2 * allowed_error(rounded.to(step.query.dtype), exact)


def random_transform_step(name: str, shape: DecodeShape, seed: int) -> TransformStep:
    """Return a decode step over random codes, gains, transforms, sinks and recent tokens."""
    random, dim = generator(shape.device, seed), decode_cases.DIM
    keys, values = map(_packed_of, _empty_sides(name, shape))
    key_side = _random_side(keys, partial(Transform.of_keys, rotation=("half", dim)), shape, random)
    value_side = _random_side(values, Transform.of_values, shape, random)
    query = random_tensor((shape.batch, shape.heads * decode_cases.GROUP, dim), torch.float16, random)
    lengths = torch.full((shape.batch,), shape.context, dtype=torch.int32, device=shape.device)
    rope = rope_tables("half", dim // 2, shape)
    return TransformStep(query, key_side, value_side, lengths, rope)


def _empty_sides(name: str, shape: DecodeShape) -> tuple[Side, Side]:
    """Return keys and values of a store without memory."""
    store, size = STORES[name], (shape.batch, shape.heads, _packed(shape), decode_cases.DIM)
    make = partial(aot_cases.empty_side, dtype=torch.float16, gain=store.gain)
    return make(store.keys, True, *size), make(store.values, False, *size)


def _packed(shape: DecodeShape) -> int:
    """Return the number of packed tokens, whole blocks."""
    return (shape.context - SINKS - RECENT) // 16 * 16


def _packed_of(side: Side) -> Transformed:
    assert isinstance(side.packed, Transformed)
    return side.packed


def _nbytes(side: Side) -> int:
    """Return the bytes that a step reads of one side; its transform counts once."""
    packed = _packed_of(side)
    assert packed.transform.operands is not None
    operands = packed.transform.operands
    return stored_bytes(*packed.codes, packed.gain, operands.synthesis, operands.mean)


def _random_side(
    packed: Transformed, make: Callable[..., Transform], shape: DecodeShape, random: torch.Generator
) -> Side:
    """Return random codes like `packed`, a transform that `make` makes, and exact tokens."""
    codes = tuple(random_tensor(tuple(x.shape), x.dtype, random) for x in packed.codes)
    gain = None if packed.gain is None else random_tensor(tuple(packed.gain.shape), torch.uint8, random) // 8 + 112
    sinks, ring = (
        random_tensor((shape.batch, shape.heads, tokens, decode_cases.DIM), torch.float16, random)
        for tokens in (SINKS, RING)
    )
    count = torch.full((shape.batch,), _packed(shape), dtype=torch.int32, device=shape.device)
    transform = make(*_random_transform(packed.transform, random), dim=decode_cases.DIM)
    return Side(Transformed(codes, gain, transform), count, sinks, ring)


def _random_transform(transform: Transform, random: torch.Generator) -> tuple[tuple[int, ...], Tensor, Tensor, Tensor]:
    """Return (widths, synthesis, mean, center) of numbers with a variance of about 2: a sum over components, and the
    mean."""
    widths, (heads, dim, kept) = transform.widths, transform.synthesis.shape
    levels = 2.0 ** torch.tensor([float(width) for width in widths for _ in range(8)], device=random.device)
    synthesis, mean = (random_tensor(size, torch.float32, random) for size in ((heads, dim, kept), (heads, dim)))
    # A uniform code has a deviation of levels / sqrt(12).
    return widths, synthesis * (12 / kept) ** 0.5 / levels, mean, ((levels - 1) / 2).expand(heads, kept).contiguous()

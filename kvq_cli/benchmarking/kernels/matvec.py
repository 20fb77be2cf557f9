"""InnerQ's Tables 3 and 4: quantized products q K^T (Eq. 3) and p V (Eq. 5) at 2 bits, beside torch.matmul.

A case computes both products of one sequence, with groups along the inner or the outer dimension. torch.matmul reads
16-bit keys and values once for all query heads of a kv head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from kvq_kernels.planar import low_words
from kvq_kernels.quantized_matvec import Uniform, quantized_matvec
from kvq_kernels.quantized_matvec.reference import quantized_matvec_reference
from torch import Tensor

from kvq_cli.benchmarking.kernels.experiment import Case, Sizes, generator, random_tensor, relative_error
from kvq_cli.benchmarking.shapes import SHAPES, LlamaShape

MODELS = ("llama-3.2-1b", "llama-3.1-8b", "llama-2-13b")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
Axis: TypeAlias = Literal["channel", "token"]
#: Query or weights, packed keys or values, and which of the two.
Operands: TypeAlias = tuple[Tensor, Uniform, Literal["keys", "values"]]
DRY_MODELS, DRY_LENGTHS = ("tiny",), (64,)
BITS, GROUP = 2, 32
#: Axes of the groups of keys and of values: along the dimension that the product sums over (inner) or the other one.
AXES: dict[str, tuple[Axis, Axis]] = {"inner": ("token", "channel"), "outer": ("channel", "token")}


class QuantizedMatvec:
    """A case is both products, for inner or outer grouping or torch.matmul."""

    operation = "quantized_matvec"
    tuned_at = LENGTHS.index(32768) * len(MODELS) + MODELS.index("llama-3.1-8b")

    def shapes(self, sizes: Sizes, device: torch.device) -> Iterator[tuple[dict[str, Any], list[Case]]]:
        for length in sizes.pick(LENGTHS, DRY_LENGTHS, LENGTHS[:1]):
            for model in sizes.pick(MODELS, DRY_MODELS):
                shape = SHAPES[model]
                numbers = 2 * shape.kv_heads * length * shape.head_dim
                cases = [Case("torch.matmul", partial(_matmul, shape, length, device), 2 * numbers, True)]
                for grouping in AXES:
                    nbytes = numbers * BITS // 8 + 2 * numbers // GROUP
                    make = partial(_quantized, shape, length, device, grouping)
                    error = partial(_error, shape, length, device, grouping)
                    cases.append(Case(f"{grouping} grouping", make, nbytes, error=error))
                yield {"model": model, "context": length}, cases


def _vectors(shape: LlamaShape, length: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return q `[1, query_heads, head_dim]` and p `[1, query_heads, length]`, float16."""
    query = random_tensor((1, shape.heads, shape.head_dim), torch.float16, random)
    weights = random_tensor((1, shape.heads, length), torch.float16, random).softmax(dim=-1)
    return query, weights


def _matmul(shape: LlamaShape, length: int, device: torch.device, seed: int) -> Callable[[], tuple[Tensor, Tensor]]:
    random = generator(device, seed)
    query, weights = (x.view(1, shape.kv_heads, -1, x.shape[2]) for x in _vectors(shape, length, random))
    size = (1, shape.kv_heads, length, shape.head_dim)
    keys, values = (random_tensor(size, torch.float16, random) for _ in range(2))
    return lambda: (torch.matmul(query, keys.transpose(2, 3)), torch.matmul(weights, values))


def _packed(shape: LlamaShape, length: int, axis: Axis, random: torch.Generator) -> Uniform:
    """Return symmetric random codes with the sign among their bits: InnerQ's format without hybrid groups."""
    heads, dim = shape.kv_heads, shape.head_dim
    size = (1, heads, length // GROUP, dim) if axis == "channel" else (1, heads, length, dim // GROUP)
    codes = random_tensor((1, heads, length, low_words(BITS, dim)), torch.int32, random)
    scale = random_tensor(size, torch.float16, random).abs()
    return Uniform(codes, scale, BITS, axis, GROUP, level=2 ** (BITS - 1) - 1)


def _operands(shape: LlamaShape, length: int, device: torch.device, grouping: str, seed: int) -> list[Operands]:
    random = generator(device, seed)
    vectors = _vectors(shape, length, random)
    key_axis, value_axis = AXES[grouping]
    return [
        (vectors[0], _packed(shape, length, key_axis, random), "keys"),
        (vectors[1], _packed(shape, length, value_axis, random), "values"),
    ]


def _quantized(
    shape: LlamaShape, length: int, device: torch.device, grouping: str, seed: int
) -> Callable[[], tuple[Tensor, ...]]:
    operands = _operands(shape, length, device, grouping, seed)
    return lambda: tuple(quantized_matvec(*each, backend="triton") for each in operands)


def _error(shape: LlamaShape, length: int, device: torch.device, grouping: str) -> tuple[float, float]:
    """Return the error of the worse product and its limit, twice the error of PyTorch in float16."""
    errors = []
    for vectors, packed, side in _operands(shape, length, device, grouping, 0):
        exact = quantized_matvec_reference(vectors, packed, side, torch.float64)
        half = quantized_matvec_reference(vectors, packed, side, torch.float16)
        allowed = 2 * max(relative_error(half, exact), torch.finfo(torch.float16).eps / 4)
        errors.append((relative_error(quantized_matvec(vectors, packed, side, backend="triton"), exact), allowed))
    return max(errors, key=lambda pair: pair[0] / pair[1])

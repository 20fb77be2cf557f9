"""InnerQ's Tables 3 and 4: its two products (Eq. 3 and 5) at 2 bits, grouped inner and outer, beside torch.matmul.

A case is both products, scores q K^T and outputs p V, one after the other, for one sequence. torch.matmul reads 16-bit
keys and values of the kv heads as they are cached, once for all query heads of a kv head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kvq_kernels.planar import low_words
from kvq_kernels.quantized_matvec import Uniform, quantized_matvec
from kvq_kernels.quantized_matvec.reference import quantized_matvec_reference
from torch import Tensor

from kvq_cli.benchmarking.kernels.experiment import Case, Sizes, generator, random_tensor, relative_error
from kvq_cli.benchmarking.shapes import SHAPES, Shape

MODELS = ("llama-3.2-1b", "llama-3.1-8b", "llama-2-13b")
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
DRY_MODELS, DRY_LENGTHS = ("tiny",), (64,)
BITS, GROUP = 2, 32
#: Of keys' and values' groups: along the dimension that the product sums over, or along the other one.
AXES = {"inner": ("token", "channel"), "outer": ("channel", "token")}


class QuantizedMatvec:
    operation = "quantized_matvec"
    tuned_at = LENGTHS.index(32768) * len(MODELS) + MODELS.index("llama-3.1-8b")

    def groups(self, sizes: Sizes, device: torch.device) -> Iterator[tuple[dict[str, Any], list[Case]]]:
        for length in sizes.pick(LENGTHS, DRY_LENGTHS, LENGTHS[:1]):
            for model in sizes.pick(MODELS, DRY_MODELS):
                shape = SHAPES[model]
                numbers = 2 * shape.kv_heads * length * shape.head_dim
                cases = [Case("torch.matmul", partial(_plain, shape, length, device), 2 * numbers, True)]
                for grouping in AXES:
                    nbytes = numbers * BITS // 8 + 2 * numbers // GROUP
                    make = partial(_quantized, shape, length, device, grouping)
                    error = partial(_error, shape, length, device, grouping)
                    cases.append(Case(f"{grouping} grouping", make, nbytes, error=error))
                yield {"model": model, "context": length}, cases


def _vectors(shape: Shape, length: int, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """q `[1, query_heads, head_dim]`, p `[1, query_heads, length]`."""
    query = random_tensor((1, shape.heads, shape.head_dim), torch.float16, random)
    weights = random_tensor((1, shape.heads, length), torch.float16, random).softmax(dim=-1)
    return query, weights


def _plain(shape: Shape, length: int, device: torch.device, seed: int) -> Callable[[], tuple[Tensor, Tensor]]:
    random = generator(device, seed)
    query, weights = (x.view(1, shape.kv_heads, -1, x.shape[2]) for x in _vectors(shape, length, random))
    size = (1, shape.kv_heads, length, shape.head_dim)
    keys, values = (random_tensor(size, torch.float16, random) for _ in range(2))
    return lambda: (torch.matmul(query, keys.transpose(2, 3)), torch.matmul(weights, values))


def _packed(shape: Shape, length: int, axis: str, random: torch.Generator) -> Uniform:
    """Symmetric, the sign among the bits, as InnerQ has keys and values without hybrid groups."""
    heads, dim = shape.kv_heads, shape.head_dim
    size = (1, heads, length // GROUP, dim) if axis == "channel" else (1, heads, length, dim // GROUP)
    codes = random_tensor((1, heads, length, low_words(BITS, dim)), torch.int32, random)
    scale = random_tensor(size, torch.float16, random).abs()
    return Uniform(codes, scale, BITS, axis, GROUP, level=2 ** (BITS - 1) - 1)


def _operands(shape: Shape, length: int, device: torch.device, grouping: str, seed: int) -> list[tuple]:
    random = generator(device, seed)
    vectors = _vectors(shape, length, random)
    sides = [_packed(shape, length, axis, random) for axis in AXES[grouping]]
    return list(zip(vectors, sides, ("keys", "values"), strict=True))


def _quantized(
    shape: Shape, length: int, device: torch.device, grouping: str, seed: int
) -> Callable[[], tuple[Tensor, ...]]:
    operands = _operands(shape, length, device, grouping, seed)
    return lambda: tuple(quantized_matvec(*one, backend="triton") for one in operands)


def _error(shape: Shape, length: int, device: torch.device, grouping: str) -> tuple[float, float]:
    found, allowed = [], []
    for one in _operands(shape, length, device, grouping, 0):
        exact = quantized_matvec_reference(*one, torch.float64)
        plain = quantized_matvec_reference(*one, torch.float16)
        floor = torch.finfo(torch.float16).eps / 4
        found.append(relative_error(quantized_matvec(*one, backend="triton"), exact))
        allowed.append(2 * max(relative_error(plain, exact), floor))
    worst = max(range(2), key=lambda i: found[i] / allowed[i])
    return found[worst], allowed[worst]

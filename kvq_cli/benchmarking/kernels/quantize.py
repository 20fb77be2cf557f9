"""InnerQ's Figure 4: quantizing and packing keys and values, hybrid beside symmetric, at 2 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kvq_kernels.quantize_pack import Layout, quantize_pack
from kvq_kernels.quantize_pack.reference import quantize_pack_reference
from torch import Tensor

from kvq_cli.benchmarking.kernels.experiment import Case, Sizes, generator, random_tensor
from kvq_cli.benchmarking.shapes import SHAPES, Shape

MODELS = ("llama-3.2-1b", "llama-2-7b", "llama-3.1-8b", "llama-2-13b")
LENGTHS = (1024, 4096, 16384, 65536)
BITS, GROUP = 2, 32
MODES = ("symmetric", "hybrid")
#: Of keys and of values: InnerQ groups both along the dimension that their product sums over.
AXES = ("token", "channel")


class QuantizePack:
    """A case is keys and values of one layer, one after the other."""

    operation = "quantize_pack"
    tuned_at = LENGTHS.index(16384) * len(MODELS) + MODELS.index("llama-3.1-8b")

    def groups(self, sizes: Sizes, device: torch.device) -> Iterator[tuple[dict[str, Any], list[Case]]]:
        for length in sizes.pick(LENGTHS, (64,), LENGTHS[:1]):
            for model in sizes.pick(MODELS, ("tiny",)):
                shape = SHAPES[model]
                numbers = 2 * shape.kv_heads * length * shape.head_dim
                nbytes = numbers * (16 + BITS + 1) // 8 + 6 * numbers // GROUP
                cases = []
                for mode in MODES:
                    given = shape, length, device, mode
                    cases.append(Case(mode, partial(_quantize, *given), nbytes, error=partial(_different, *given)))
                yield {"model": model, "context": length}, cases


def _layouts(shape: Shape, mode: str) -> list[Layout]:
    given = {"mode": mode, "sign": "extra", "zero_dtype": torch.float32}
    return [Layout(BITS, axis, GROUP, shape.head_dim, **given) for axis in AXES]


def _numbers(shape: Shape, length: int, device: torch.device, seed: int) -> list[Tensor]:
    random = generator(device, seed)
    return [random_tensor((1, shape.kv_heads, length, shape.head_dim), torch.float16, random) for _ in AXES]


def _quantize(shape: Shape, length: int, device: torch.device, mode: str, seed: int) -> Callable[[], list]:
    pairs = list(zip(_numbers(shape, length, device, seed), _layouts(shape, mode), strict=True))
    return lambda: [quantize_pack(x, layout, backend="triton") for x, layout in pairs]


def _different(shape: Shape, length: int, device: torch.device, mode: str) -> tuple[float, float]:
    """The share of packed words that are not the reference's: none may be."""
    different = total = 0
    for x, layout in zip(_numbers(shape, length, device, 0), _layouts(shape, mode), strict=True):
        found, exact = quantize_pack(x, layout, backend="triton"), quantize_pack_reference(x, layout)
        for name in ("codes", "scale", "zero", "sign"):
            mine, own = getattr(found, name), getattr(exact, name)
            if own is not None:
                different += int((mine != own).sum())
                total += own.numel()
    return different / total, 0.0

"""InnerQ's Figure 4: quantizing and packing keys and values at 2 bits, hybrid beside symmetric groups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from kvq_kernels.quantize_pack import Layout, quantize_pack
from kvq_kernels.quantize_pack.reference import quantize_pack_reference
from torch import Tensor

from kvq_cli.benchmarking.kernels.experiment import Case, Sizes, generator, random_tensor
from kvq_cli.benchmarking.shapes import SHAPES, LlamaShape

Mode: TypeAlias = Literal["symmetric", "hybrid"]
MODELS = ("llama-3.2-1b", "llama-2-7b", "llama-3.1-8b", "llama-2-13b")
LENGTHS = (1024, 4096, 16384, 65536)
BITS, GROUP = 2, 32
MODES: tuple[Mode, ...] = ("symmetric", "hybrid")
#: Axes of the groups of keys and of values: InnerQ groups both along the dimension that their product sums over.
AXES: tuple[Literal["channel", "token"], ...] = ("token", "channel")


class QuantizePack:
    """A case quantizes keys, then values of one layer."""

    operation = "quantize_pack"
    tuned_at = LENGTHS.index(16384) * len(MODELS) + MODELS.index("llama-3.1-8b")

    def shapes(self, sizes: Sizes, device: torch.device) -> Iterator[tuple[dict[str, Any], list[Case]]]:
        for length in sizes.pick(LENGTHS, (64,), LENGTHS[:1]):
            for model in sizes.pick(MODELS, ("tiny",)):
                shape = SHAPES[model]
                numbers = 2 * shape.kv_heads * length * shape.head_dim
                # Numbers, codes and signs; a scale per group. A hybrid's zero-points are in the words of the signs.
                nbytes = numbers * (16 + BITS + 1) // 8 + 2 * numbers // GROUP
                cases = []
                for mode in MODES:
                    make = partial(_quantize, shape, length, device, mode)
                    error = partial(_differing_share, shape, length, device, mode)
                    cases.append(Case(mode, make, nbytes, error=error))
                yield {"model": model, "context": length}, cases


def _layouts(shape: LlamaShape, mode: Mode) -> list[Layout]:
    return [
        Layout(BITS, axis, GROUP, shape.head_dim, mode=mode, sign="extra", zero_dtype=torch.float32) for axis in AXES
    ]


def _numbers(shape: LlamaShape, length: int, device: torch.device, seed: int) -> list[Tensor]:
    """Return random keys and values, float16 `[1, kv_heads, length, head_dim]`."""
    random = generator(device, seed)
    return [random_tensor((1, shape.kv_heads, length, shape.head_dim), torch.float16, random) for _ in AXES]


def _quantize(shape: LlamaShape, length: int, device: torch.device, mode: Mode, seed: int) -> Callable[[], list[Any]]:
    pairs = list(zip(_numbers(shape, length, device, seed), _layouts(shape, mode), strict=True))
    return lambda: [quantize_pack(x, layout, backend="triton") for x, layout in pairs]


def _differing_share(shape: LlamaShape, length: int, device: torch.device, mode: Mode) -> tuple[float, float]:
    """Return the share of packed words that differ from the reference, and the allowed share, 0."""
    differing = total = 0
    for x, layout in zip(_numbers(shape, length, device, 0), _layouts(shape, mode), strict=True):
        found, exact = quantize_pack(x, layout, backend="triton"), quantize_pack_reference(x, layout)
        for name in ("codes", "scale", "zero", "sign"):
            packed, expected = getattr(found, name), getattr(exact, name)
            if expected is not None:
                differing += int((packed != expected).sum())
                total += expected.numel()
    return differing / total, 0.0

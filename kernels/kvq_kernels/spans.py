"""Attention in spans of packed tokens: scores of a span first, then sums of what is cached over its tokens, so that no
buffer grows with the context."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import triton
from torch import Tensor

from kvq_kernels.decode_attention.launch import float32_products, sm_count
from kvq_kernels.decode_attention.parts import Rope

#: Of a program that merges splits: elements of the partial sums that it reads at once, output channels.
MERGED_ELEMENTS, PROJECTED_CHANNELS = 2048, 32
MAX_SPLITS = 16

#: (grid, run-time arguments, compile-time arguments, Triton's options) of a kernel.
GridLaunch: TypeAlias = tuple[tuple[int, ...], tuple[Any, ...], dict[str, Any], dict[str, Any]]


def launch_kernel(kernel: Any, launch: GridLaunch) -> None:
    """Launch a kernel."""
    grid, arguments, constants, options = launch
    kernel[grid](*arguments, **constants, **options)


@dataclass(frozen=True)
class SpanCall:
    """What the launches of one call share beside keys and values. gpu: family, for the tuning table."""

    query: Tensor
    lengths: Tensor
    scaling: float
    rope: Rope | None
    window: int | None
    gpu: str

    @property
    def kv_heads(self) -> int:
        raise NotImplementedError

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.query.shape[1] // self.kv_heads

    @property
    def base2_scaling(self) -> float:
        """The factor on scores whose softmax is taken by powers of 2."""
        return self.scaling * math.log2(math.e)

    @property
    def precision(self) -> str:
        """Of products of float32 numbers."""
        return float32_products(self.query.dtype, not self.gpu.startswith("gfx"))

    @property
    def rotation(self) -> dict[str, Any]:
        """Compile-time arguments of RoPE."""
        if self.rope is None:
            return {"STYLE": "none", "WIDTH": 0}
        return {"STYLE": self.rope.style, "WIDTH": 2 * self.rope.frequencies.numel()}

    @property
    def tables(self) -> tuple[Tensor | None, ...]:
        """Run-time arguments of RoPE, as `key_scores.store_scores` takes them."""
        return (None,) * 3 if self.rope is None else (self.rope.coarse, self.rope.fine, self.rope.offset)

    @property
    def heads(self) -> dict[str, int]:
        """Compile-time arguments of a kv head."""
        return {"D": self.query.shape[2], "GROUP": self.group, "M": triton.next_power_of_2(self.group)}

    def merged(self, splits: int) -> int:
        """Summed numbers that a program which merges so many splits reads at once."""
        return max(16, min(128, MERGED_ELEMENTS // (self.heads["M"] * triton.next_power_of_2(splits))))


@dataclass
class Workspace:
    """Buffers between the kernels; their size does not depend on the context.

    scores:  float32 `[B, Q, span]`, of `span` tokens at a time.
    partial: float32 `[B, Q, splits, R]`, sum of p x over each split's tokens, x being what is cached.
    logsum:  float32 `[2, B, Q, splits]`, their log-sum-exp (base 2); one half is read while the other is written.
    """

    scores: Tensor
    partial: Tensor
    logsum: Tensor

    @classmethod
    def like(cls, query: Tensor, rank: int, span: int, splits: int) -> Workspace:
        """An empty workspace for `query` `[B, Q, D]` over values of which R = `rank` numbers are summed."""
        rows, heads, _ = query.shape
        return cls(*_empty(query, (rows, heads, span), (rows, heads, splits, rank), (2, rows, heads, splits)))

    @property
    def span(self) -> int:
        return self.scores.shape[2]

    @property
    def splits(self) -> int:
        return self.logsum.shape[3]

    def logsums(self, span_index: int) -> tuple[Tensor, Tensor]:
        """(before, after) the span with this number."""
        return self.logsum[span_index % 2], self.logsum[(span_index + 1) % 2]


def _empty(query: Tensor, *sizes: tuple[int, ...]) -> list[Tensor]:
    return [torch.empty(size, dtype=torch.float32, device=query.device) for size in sizes]


def count_splits(query: Tensor, parts: int, tiles: int) -> int:
    """Splits of the tokens, for two programs per multiprocessor, as far as there are tiles. parts: programs of a split
    of one row."""
    wanted = triton.cdiv(2 * sm_count(query.device), parts * query.shape[0])
    return max(1, min(MAX_SPLITS, wanted, tiles))

"""Sizes of tiles at compile time: `Tile`, for which `configs.py` has a table, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kvq_kernels.decode_attention.formats.format import SideSpec
from kvq_kernels.decode_attention.rope import padded_dim

#: Channels of a column tile of exact tokens without RoPE.
EXACT_COLUMNS = 64


@dataclass(frozen=True)
class Tile:
    """Launch configuration of decode attention; a row of `tuning.json`.

    tokens:    of a tile of the main loop (a divisor of 128). columns: channels (or codes) handled at once.
    warps, stages: Triton's.
    waves:     programs per multiprocessor that the number of splits aims at.
    fences:    1: scheduling fences between loads of codebook entries, which ptxas needs; 0: none.
    queries:   at least so many columns in a product with packed numbers: as many as a matrix unit takes.
    registers: at most so many per thread, which spills a few where that lets more programs run at once; 0: no limit.
    rows:      of several queries per row, at most so many rows of a kv head in a program, if one query's are not more.
    nvidia:    0: no PTX assembly, also where the kernel is compiled on a machine without a GPU.
    """

    tokens: int = 64
    columns: int = 16
    warps: int = 1
    stages: int = 2
    waves: int = 8
    fences: int = 1
    queries: int = 8
    registers: int = 0
    nvidia: int = 1
    rows: int = 8

    def options(self, queries: int = 1) -> dict[str, int]:
        """Launch options for Triton. AMD's compiler takes no limit of registers; several queries need more of them."""
        options = {"num_warps": self.warps, "num_stages": max(1, self.stages)}
        limited = self.registers and queries == 1 and torch.version.hip is None
        return options | ({"maxnreg": self.registers} if limited else {})


@triton.constexpr_function
def mixed_out_of_line(keys: SideSpec, values: SideSpec) -> bool:
    """Whether attention to mixed tokens is compiled as a function that is called, beside a long main loop. On AMD's
    GPUs a call needs a stack."""
    return (keys.fences_loads or values.fences_loads) and keys.nvidia


@triton.constexpr_function
def column_tiles(spec: SideSpec, columns: int) -> int:
    """Number of column tiles of `columns` channels in a head, padded to a power of two."""
    return padded_dim(spec.dim) // columns


@triton.constexpr_function
def exact_columns(spec: SideSpec, style: str, pairs: int) -> int:
    """Channels of a column tile of exact tokens; with RoPE pairs of channels, at most `pairs`."""
    return min(EXACT_COLUMNS, padded_dim(spec.dim)) if style == "none" else min(pairs, padded_dim(spec.dim) // 2)


@triton.constexpr_function
def exact_queries(spec: SideSpec, queries: int) -> int:
    """Columns of a product with exact tokens: as many as a matrix unit takes, at least."""
    return max(queries, 8 if spec.nvidia else 16)

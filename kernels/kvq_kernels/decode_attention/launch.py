"""Launches of decode attention: arguments of its kernels from tensors, the number of splits, the workspace.

`kernel.py` has the kernels, `configs.py` the tuned tiles, `arguments.py` the arguments of a side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kvq_kernels.decode_attention import by_element
from kvq_kernels.decode_attention.arguments import kv_heads, pointers, side_spec
from kvq_kernels.decode_attention.configs import MIN_TOKENS, choose_splits, choose_tile
from kvq_kernels.decode_attention.formats.format import SideSpec, TileLoop
from kvq_kernels.decode_attention.kernel import EXACT_COST, MIXED_COST, combine_kernel, split_kernel
from kvq_kernels.decode_attention.parts import Dense, Packed, PerHead, Rope, Side
from kvq_kernels.decode_attention.rope import padded_dim
from kvq_kernels.decode_attention.several_queries import (
    as_query_rows,
    padded_count,
    query_blocks,
    query_count,
    query_rows,
)
from kvq_kernels.decode_attention.subtiles import SUBTILE
from kvq_kernels.decode_attention.tiles import Tile
from kvq_kernels.launch_device import on_its_device

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
#: Multiprocessors to plan for where there is no GPU.
DEFAULT_SM_COUNT = 132
#: Window without a limit: more tokens than any text has.
NO_WINDOW = 1 << 30
#: Tokens of a tile of mixed tokens, and of exact ones for each warp.
TAIL_TILE = 16
#: Pairs of channels of a column tile of exact tokens with RoPE.
EXACT_PAIRS = 32
#: Numbers of splits that a program of the combination holds at once: 64 per thread.
COMBINED_NUMBERS = 8192
COMBINE_OPTIONS = {"num_warps": 4}


@dataclass
class Workspace:
    """Results of the splits, which the combination reads: partial float32 `[B, Q, splits + 2, D]`, logsum float32
    `[B, Q, splits + 2]`. Its size does not depend on the context: keep it between steps (and in a captured graph)."""

    partial: Tensor
    logsum: Tensor

    @classmethod
    def like(cls, query: Tensor, splits: int) -> Workspace:
        """An empty workspace for `query` `[B, Q, D]` or `[B, Q, k, D]`; it has as many heads as `query_rows`. splits:
        of whole tiles, at least 1; exact and mixed tokens have one more each."""
        if splits < 1:
            raise ValueError(f"a workspace for {splits} splits: at least 1, see plan_splits")
        rows, heads, dim = as_query_rows(query.shape, padded_count(query))
        shape = (rows, heads, splits + 2)
        return cls(
            torch.empty(*shape, dim, dtype=torch.float32, device=query.device),
            torch.empty(shape, dtype=torch.float32, device=query.device),
        )

    @property
    def programs(self) -> int:
        """Programs of each row and kv head."""
        return self.logsum.shape[2]


def constants(
    query_type: torch.dtype,
    keys: Side,
    values: Side,
    rope: Rope | None,
    group: int,
    dim: int,
    tile: Tile,
    heads: int | None = None,
    queries: int = 1,
) -> dict[str, Any]:
    """Compile-time arguments of `split_kernel`. group: query heads of a kv head. heads: all kv heads, where the sides
    have only some of them. queries: `padded_count`."""
    nvidia = bool(tile.nvidia) and torch.version.hip is None
    sk, sv = (side_spec(side, dim, fenced=bool(tile.fences), nvidia=nvidia) for side in (keys, values))
    if sk.first != sv.first:
        raise ValueError(f"the first packed token is at place {sk.first} of the keys, but {sv.first} of the values")
    blocks = query_blocks(group, queries, tile.rows)
    group = group * queries // blocks
    loops = tile_loops(
        sk,
        sv,
        (product_type(keys, query_type), product_type(values, query_type)),
        STYLE="none" if rope is None else rope.style,
        WIDTH=0 if rope is None else 2 * rope.frequencies.numel(),
        GROUP=group,
        M=max(triton.next_power_of_2(group), tile.queries if sk.coded or sv.coded else 1),
        N=_tile_tokens(keys, sk, values, sv, rope, tile),
        E=max(16, min(tile.columns, padded_dim(dim) // 2)),
        PRECISION=float32_products(query_type, nvidia),
    )
    return {
        "K": loops[0],
        "V": loops[1],
        "HEADS": kv_heads(keys) if heads is None else heads,
        "QUERIES": queries,
        "BLOCKS": blocks,
        "SINKS": 0 if keys.sinks is None else keys.sinks.shape[2],
        "MIXED_TILE": TAIL_TILE,
        "EXACT_TILE": TAIL_TILE * tile.warps,
        "EXACT_PAIRS": EXACT_PAIRS,
        "XD": exact_type(query_type) if has_exact(query_type, keys, values) else None,
        "PACKED_EXACT": packed_exact(query_type, keys, values),
        "STAGES": tile.stages,
    }


@lru_cache(maxsize=4096)  # asked for by each layer at each step
def tile_loops(
    keys: SideSpec, values: SideSpec, types: tuple[tl.dtype, tl.dtype], N: int, **constants: Any
) -> tuple[TileLoop, TileLoop]:
    """Constants of the main loop over tiles of N tokens, of the keys and the values. types: that they are multiplied
    in. constants: further fields of `TileLoop`.

    A reader of whole tiles serves beside a reader of subtiles only element by element.
    """
    key_reader = keys.key_reader(N, constants["STYLE"], constants["WIDTH"], types[0])
    value_reader = values.value_reader(N, types[1])
    subtiled = any(reader is not None and reader.subtiles for reader in (key_reader, value_reader))
    if key_reader is None or key_reader.subtiles < subtiled:
        key_reader = by_element.KEYS
    if value_reader is None or value_reader.subtiles < subtiled:
        value_reader = by_element.VALUES
    count, block = (N // SUBTILE.value, max(keys.tokens, values.tokens)) if subtiled else (1, 1)
    sizes: dict[str, Any] = {"N": N, "L": count, "R": N // count, "BLOCK": block}
    return (
        TileLoop(S=keys, reader=key_reader, T=types[0], **sizes, **constants),
        TileLoop(S=values, reader=value_reader, T=types[1], **sizes, **constants),
    )


def _tile_tokens(keys: Side, sk: SideSpec, values: Side, sv: SideSpec, rope: Rope | None, tile: Tile) -> int:
    """Tokens of a tile: whole blocks of codes and outliers, and of scales per channel; they divide cells of pages."""
    block = max(sk.tokens, sv.tokens)
    tokens = max(tile.tokens, MIN_TOKENS * block)
    if not (sk.fences_loads or sv.fences_loads):
        for spec in (sk, sv):
            if math.gcd(spec.scale_tokens, tokens) >= MIN_TOKENS:
                tokens = math.gcd(spec.scale_tokens, tokens)
    tokens = max([tokens, *(spec.outlier_block for spec in (sk, sv) if spec.outliers)])
    for side, spec in ((keys, sk), (values, sv)):
        tokens = _tile_in_cells(tokens, side, spec, block)
    if rope is not None and tokens > Rope.STEP:
        raise ValueError(
            f"a tile of {tokens} tokens is longer than the fine table of cosines: with RoPE, outliers must be in "
            f"blocks of at most {Rope.STEP} tokens, codes of at most {Rope.STEP // MIN_TOKENS}"
        )
    return tokens


def _tile_in_cells(tokens: int, side: Side, spec: SideSpec, code_tokens: int) -> int:
    """Tokens of a tile, at most `tokens`, that divide the cells of a side's pages. ValueError if there are none.
    code_tokens: of a code of either side."""
    if side.pages is None or spec.cell % tokens == 0:
        return tokens
    least, fitting = max(16 * code_tokens, spec.outlier_block), math.gcd(spec.cell, tokens)
    if fitting % least:
        raise ValueError(
            f"pages of {side.pages.block_size} tokens, {spec.cell} in a contiguous run, are no whole number of tiles "
            f"of {least} tokens: use a block size that is a multiple of {least}"
        )
    return fitting


def arguments(
    query: Tensor,
    keys: Side,
    values: Side,
    lengths: Tensor,
    rope: Rope | None,
    scaling: float,
    workspace: Workspace,
    window: int | None = None,
    heads: tuple[Tensor, Tensor, Tensor] | None = None,
    queries: int = 1,
) -> tuple[Any, ...]:
    """Run-time arguments of `split_kernel`. query: of `query_rows`. queries: `query_count`."""
    (key_tensors, key_strides), (value_tensors, value_strides) = pointers(keys), pointers(values)
    return (
        query,
        workspace.partial,
        workspace.logsum,
        lengths,
        (keys.count, values.count),
        NO_WINDOW if window is None else window,
        None if queries == 1 else queries - 1,
        heads,
        key_tensors,
        value_tensors,
        key_strides,
        value_strides,
        tuple(1 if side.ring is None else side.ring.shape[2] for side in (keys, values)),
        (None,) * 4 if rope is None else (rope.coarse, rope.fine, rope.fine_half, rope.offset),
        scaling * math.log2(math.e),
    )


def float32_products(query_type: torch.dtype, nvidia: bool) -> str:
    """Precision of products of float32 numbers ("ieee" or "bf16x3").

    NVIDIA's tf32 truncates to 11 bits, four times the error of float16's rounding; three products of bfloat16 parts
    keep 16 bits, in fewer registers than three of tf32.
    """
    exact = query_type == torch.float32 or not nvidia or knobs.runtime.interpret
    return "ieee" if exact else "bf16x3"


def product_type(side: Side, query_type: torch.dtype) -> tl.dtype:
    """Type that a side's numbers are multiplied in: of packed ones float16, whose subnormal numbers are their codes."""
    if query_type == torch.float32:
        return tl.float32
    assert not isinstance(side.packed, PerHead)
    dtype = TYPES[side.packed.product_type]
    # The interpreter keeps bfloat16 as 16-bit integers, and multiplies those.
    return tl.float32 if knobs.runtime.interpret and dtype == tl.bfloat16 else dtype


def exact_type(query_type: torch.dtype) -> tl.dtype | None:
    """Type that exact tokens are multiplied in; None: float32, as mixed tokens."""
    if query_type == torch.float32:
        return None
    return tl.float32 if knobs.runtime.interpret and query_type == torch.bfloat16 else TYPES[query_type]


def has_exact(query_type: torch.dtype, *sides: Side) -> bool:
    """Whether there may be exact tokens: sinks, tokens in both rings, or packed ones that are read so."""
    windows = (lambda side: side.sinks is not None, lambda side: side.ring is not None)
    return packed_exact(query_type, *sides) or any(all(has(side) for side in sides) for has in windows)


def packed_exact(query_type: torch.dtype, *sides: Side) -> bool:
    """Whether packed tokens can be read as exact ones: dense on both sides, in the windows' type."""
    return query_type != torch.float32 and all(
        isinstance(side.packed, Dense)
        and side.outliers is None
        and side.norm is None
        and all(x is None or x.dtype == side.packed.numbers.dtype for x in (side.sinks, side.ring))
        for side in sides
    )


def capacity(side: Side) -> int:
    """Tokens per row that the packed store has room for."""
    if side.pages is not None:
        return side.pages.block_table.shape[1] * side.pages.block_size - side.pages.first
    return side.members[0].room


def sm_count(device: torch.device) -> int:
    """Multiprocessors of a GPU; without one, `DEFAULT_SM_COUNT`."""
    if device.type != "cuda":
        return DEFAULT_SM_COUNT
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_splits(query: Tensor, keys: Side, values: Side, rope: Rope | None = None, tile: Tile | None = None) -> int:
    """Splits of each row and kv head, for `Workspace.like`.

    They depend on how many tokens the stores and windows have room for, not on how many there are.
    """
    part, dim = head_groups(keys, values, query.device)[0], query.shape[-1]
    group = query.shape[1] // kv_heads(keys)
    tile = tile or choose_tile(query.device, side_spec(part.keys, dim), side_spec(part.values, dim))
    fixed = constants(query.dtype, part.keys, part.values, rope, group, dim, tile, queries=padded_count(query))
    rings = [0 if side.ring is None else side.ring.shape[2] for side in (keys, values)]
    exact, mixed = fixed["SINKS"] + max(rings), abs(rings[0] - rings[1])
    tokens = min(capacity(keys), capacity(values)) + EXACT_COST.value * exact + MIXED_COST.value * mixed
    tiles = max(2, -(-tokens // fixed["K"].N))
    programs = query.shape[0] * kv_heads(keys) * fixed["BLOCKS"]
    return max(3, choose_splits(programs, tiles, sm_count(query.device), tile.waves)) - 2


@dataclass(frozen=True)
class HeadGroup:
    """Kv heads with the same storage of keys and the same of values: one launch. heads: as in `split_kernel`; None: all
    heads, in order."""

    keys: Side
    values: Side
    heads: tuple[Tensor, Tensor, Tensor] | None
    count: int


def head_groups(keys: Side, values: Side, device: torch.device) -> list[HeadGroup]:
    """The sides divided into `HeadGroup`s."""
    if not any(isinstance(side.packed, PerHead) for side in (keys, values)):
        return [HeadGroup(keys, values, None, kv_heads(keys))]
    groups = []
    for key_packed, key_heads in _members(keys):
        for value_packed, value_heads in _members(values):
            if heads := _shared_heads(key_heads, value_heads, device):
                sides = replace(keys, packed=key_packed), replace(values, packed=value_packed)
                groups.append(HeadGroup(*sides, heads, heads[0].numel()))
    return groups


def _members(side: Side) -> list[tuple[Packed, tuple[int, ...]]]:
    """(storage, kv heads) of each member."""
    if isinstance(side.packed, PerHead):
        return list(zip(side.packed.members, side.packed.heads, strict=True))
    return [(side.packed, tuple(range(kv_heads(side))))]


@cache
def _shared_heads(
    keys: tuple[int, ...], values: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Heads in both tuples, and their indices in either, as tensors that are sent to the device once; None: no head."""
    shared = [head for head in keys if head in values]
    if not shared:
        return None
    rows = shared, list(map(keys.index, shared)), list(map(values.index, shared))
    heads, in_keys, in_values = (torch.tensor(row, dtype=torch.int32, device=device) for row in rows)
    return heads, in_keys, in_values


@on_its_device
def run_kernels(
    query: Tensor,
    keys: Side,
    values: Side,
    lengths: Tensor,
    scaling: float,
    rope: Rope | None,
    window: int | None,
    workspace: Workspace | None,
    out: Tensor | None,
    tile: Tile | None,
) -> Tensor:
    """`decode_attention` by the kernels: a split pass for each `HeadGroup`, and the combination."""
    rows, heads, dim = query.shape[0], query.shape[1], query.shape[-1]
    group, queries, padded = heads // kv_heads(keys), query_count(query), padded_count(query)
    if workspace is None:
        workspace = Workspace.like(query, plan_splits(query, keys, values, rope, tile))
    q = query_rows(query)
    result = torch.empty_like(q) if out is None or queries < padded else out.view(q.shape)
    for part in head_groups(keys, values, query.device):
        chosen = tile or choose_tile(query.device, side_spec(part.keys, dim), side_spec(part.values, dim))
        fixed = constants(query.dtype, part.keys, part.values, rope, group, dim, chosen, heads // group, padded)
        split_kernel[(part.count * fixed["BLOCKS"], workspace.programs, rows)](
            *arguments(q, part.keys, part.values, lengths, rope, scaling, workspace, window, part.heads, queries),
            **fixed,
            **chosen.options(padded),
        )
    combine(workspace, result)
    if query.ndim == 3:
        return result
    result = result.view(rows, heads, padded, dim)[:, :, padded - queries :]
    return result if out is None or queries == padded else out.copy_(result)


def combine(workspace: Workspace, out: Tensor) -> None:
    """Merge the splits of a workspace into `out` `[B, Q, D]`, laid out as `query_rows`."""
    count, (rows, heads, dim) = workspace.programs, out.shape
    fixed = combine_constants(dim, count)
    combine_kernel[(rows * heads,)](workspace.partial, workspace.logsum, out, count, **fixed, **COMBINE_OPTIONS)


def combine_constants(dim: int, count: int) -> dict[str, int]:
    """Compile-time arguments of `combine_kernel` for `count` splits."""
    wide = triton.next_power_of_2(dim)
    return {"D": dim, "WIDE": wide, "S": min(triton.next_power_of_2(count), max(1, COMBINED_NUMBERS // wide))}

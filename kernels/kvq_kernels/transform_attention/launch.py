"""Launches of attention over transform codes: arguments of the kernel, splits, workspace."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from kvq_kernels.decode_attention.arguments import kv_heads, pointers
from kvq_kernels.decode_attention.configs import choose_splits
from kvq_kernels.decode_attention.launch import (
    NO_WINDOW,
    TAIL_TILE,
    HeadGroup,
    Workspace,
    capacity,
    combine,
    float32_products,
    head_groups,
    sm_count,
)
from kvq_kernels.decode_attention.launch import run_kernels as attend_dense
from kvq_kernels.decode_attention.parts import Dense, Rope, Side
from kvq_kernels.decode_attention.reference import unpack_side
from kvq_kernels.decode_attention.spec import SideSpec
from kvq_kernels.decode_attention.transformed import Operands, Transformed, lane_shifts
from kvq_kernels.launch_device import on_its_device
from kvq_kernels.transform_attention.codes import FieldSpec
from kvq_kernels.transform_attention.kernel import split_kernel
from kvq_kernels.tuning import configuration, family

OPERATION = "transform_attention"
#: Exact tokens of a program, about, and programs for them at most; channels that these multiply at once.
EXACT_TOKENS, MAX_EXACT_PROGRAMS, EXACT_CHANNELS = 2 * TAIL_TILE, 8, 16
#: Pairs of channels in a product, at least.
MIN_PAIRS = 16
#: Least number of query heads in a product, by the maker of the GPU.
MIN_QUERIES = {"nvidia": 8, "amd": 16}


@dataclass(frozen=True)
class Config:
    """A row of `tuning.json`. warps: of 16 tokens of a tile each. pairs: of channels of a column tile, at most.

    chunks: of the keys' components at most, 0: any (`FieldSpec`). reload: 1: S' of the keys is loaded for each tile.
    half_sums: 1: keys are summed in float16. programs: of a multiprocessor. registers: of a thread at most, 0: any.
    """

    warps: int
    stages: int
    pairs: int
    chunks: int
    reload: int
    half_sums: int
    programs: int
    registers: int

    @classmethod
    def of(cls, gpu: str, dim: int) -> Config:
        """The tuned configuration for a GPU family and head_dim."""
        return cls(**configuration(OPERATION, f"split/{dim}", gpu))

    @property
    def tokens(self) -> int:
        """Tokens of a tile."""
        return 16 * self.warps

    def options(self) -> dict[str, int]:
        """Launch options for Triton. AMD's compiler takes no limit of registers."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options | ({"maxnreg": self.registers} if self.registers and torch.version.hip is None else {})


def fused(query: Tensor, *sides: Side) -> bool:
    """Whether `split_kernel` computes it: 16-bit queries, each head with its transform, and some components.

    Others are unpacked to numbers of the query's type, one layer at a time, and attended to by `decode_attention`.
    """
    stored = [packed for side in sides for packed in side.members]
    return query.dtype != torch.float32 and all(
        isinstance(packed, Transformed) and packed.transform.operands is not None for packed in stored
    )


def programs(query: Tensor, keys: Side, values: Side) -> tuple[int, int]:
    """(programs for packed tokens, programs for exact ones) of a row and head; they depend on what there is room for,
    not on how many tokens there are. Launches run one after another, so that each should fill the GPU."""
    exact = max(1, min(MAX_EXACT_PROGRAMS, triton.cdiv(sum(window_sizes(keys)), EXACT_TOKENS)))
    if not fused(query, keys, values) or capacity(keys) == 0:
        return 0, exact
    config, launches = Config.of(family(query.device), query.shape[2]), len(head_groups(keys, values, query.device))
    pairs = triton.cdiv(query.shape[0] * kv_heads(keys), launches)
    tiles = triton.cdiv(capacity(keys), config.tokens)
    return choose_splits(pairs, tiles, sm_count(query.device), config.programs), exact


def plan_splits(query: Tensor, keys: Side, values: Side) -> int:
    """Results of each query head that a workspace holds."""
    return sum(programs(query, keys, values))


def new_workspace(query: Tensor, keys: Side, values: Side) -> Workspace:
    """Workspace for all tokens that there is room for."""
    return Workspace.like(query, max(1, plan_splits(query, keys, values) - 1))


def window_sizes(side: Side) -> tuple[int, int]:
    """Tokens that sinks and ring buffer hold."""
    sinks, ring = (0 if window is None else window.shape[2] for window in (side.sinks, side.ring))
    return sinks, ring


def _stored(side: Side) -> tuple[Transformed, Operands]:
    """The packed tokens of a side whose heads are all stored alike, and their transform."""
    assert isinstance(side.packed, Transformed) and side.packed.transform.operands is not None
    return side.packed, side.packed.transform.operands


def _pointers(packed: Transformed) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Codes of all parts and the gain (or, without one, codes) as words `[B, H, words]`; strides of the codes' B, H."""
    gain = packed.codes[0] if packed.gain is None else packed.gain
    *codes, gain = (x.flatten(2).view(torch.int32) for x in (*packed.codes, gain))
    return (*codes, gain), tuple(stride for x in codes for stride in x.stride()[:2])


def _exact_side(side: Side) -> Side:
    """The side with exact tokens in place of its packed ones, which the kernel reads otherwise."""
    exact = side.sinks if side.ring is None else side.ring
    assert exact is not None
    return replace(side, packed=Dense(exact))


def _dense_side(side: Side, query: Tensor) -> Side:
    """The side with its packed tokens as numbers of the query's type."""
    return replace(side, packed=Dense(unpack_side(side, query.dtype, query.shape[2]).contiguous()))


def arguments(
    query: Tensor,
    group: HeadGroup,
    lengths: Tensor,
    scaling: float,
    rope: Rope | None,
    window: int | None,
    workspace: Workspace,
    exact_programs: int,
) -> tuple[Any, ...]:
    """Run-time arguments of `split_kernel`."""
    keys, values = group.keys, group.values
    (packed_keys, key_operands), (packed_values, value_operands) = _stored(keys), _stored(values)
    (key_words, key_strides), (value_words, value_strides) = _pointers(packed_keys), _pointers(packed_values)
    exact_keys, exact_values = pointers(_exact_side(keys)), pointers(_exact_side(values))
    return (
        query,
        workspace.partial,
        workspace.logsum,
        lengths,
        keys.count,
        NO_WINDOW if window is None else window,
        workspace.logsum.shape[2] - exact_programs,
        group.heads,
        kv_heads(keys),
        len(key_operands.mean),
        len(value_operands.mean),
        packed_keys.room,
        key_words,
        key_strides,
        value_words,
        value_strides,
        (key_operands.synthesis, key_operands.mean, key_operands.unit),
        (value_operands.synthesis, value_operands.mean),
        lane_shifts(query.device),
        exact_keys[0],
        exact_values[0],
        exact_keys[1],
        exact_values[1],
        tuple(max(1, window_sizes(side)[1]) for side in (keys, values)),
        (None,) * 4 if rope is None else (rope.coarse, rope.fine, rope.fine_half, rope.offset),
        scaling * math.log2(math.e),
    )


def constants(query: Tensor, group: HeadGroup, rope: Rope | None, config: Config, gpu: str) -> dict[str, Any]:
    """Compile-time arguments of `split_kernel`."""
    keys, values = group.keys, group.values
    packed_keys, packed_values = _stored(keys)[0], _stored(values)[0]
    dim, queries, nvidia = query.shape[2], query.shape[1] // kv_heads(keys), not gpu.startswith("gfx")
    return {
        "KF": FieldSpec.of(packed_keys.transform.widths, packed_keys.gain is not None, config.chunks),
        "VF": FieldSpec.of(packed_values.transform.widths, packed_values.gain is not None),
        "SK": SideSpec.of(_exact_side(keys), dim),
        "SV": SideSpec.of(_exact_side(values), dim),
        "STYLE": "none" if rope is None else rope.style,
        "WIDTH": 0 if rope is None else 2 * rope.frequencies.numel(),
        "D": dim,
        "GROUP": queries,
        "M": max(triton.next_power_of_2(queries), MIN_QUERIES["nvidia" if nvidia else "amd"]),
        "SINKS": window_sizes(keys)[0],
        "N": config.tokens,
        "E": min(config.pairs, max(MIN_PAIRS, triton.next_power_of_2(dim // 2))),
        "RELOAD": bool(config.reload),
        "TAIL_E": EXACT_CHANNELS,
        "HALF_SUMS": bool(config.half_sums),
        "ASSEMBLY": nvidia and not knobs.runtime.interpret,
        "PRECISION": float32_products(query.dtype, nvidia),
        "TAIL_TILE": TAIL_TILE,
        "STAGES": config.stages,
    }


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
) -> Tensor:
    """`transform_attention` by the kernels: a pass over all tokens for each `HeadGroup`, and the combination."""
    query = query.contiguous()
    out = torch.empty_like(query) if out is None else out
    packed_programs, exact = programs(query, keys, values)
    if packed_programs == 0:
        dense_keys, dense_values = _dense_side(keys, query), _dense_side(values, query)
        return attend_dense(query, dense_keys, dense_values, lengths, scaling, rope, window, None, out, None)
    workspace = new_workspace(query, keys, values) if workspace is None else workspace
    gpu = family(query.device)
    config = Config.of(gpu, query.shape[2])
    for group in head_groups(keys, values, query.device):
        split_kernel[(group.count, workspace.logsum.shape[2], len(query))](
            *arguments(query, group, lengths, scaling, rope, window, workspace, exact),
            **constants(query, group, rope, config, gpu),
            **config.options(),
        )
    combine(workspace, out)
    return out

"""Launches of attention over transform codes: splits, workspace."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
from torch import Tensor

from kvq_kernels.decode_attention.arguments import kv_heads
from kvq_kernels.decode_attention.formats.transformed import Transformed
from kvq_kernels.decode_attention.launch import Workspace, capacity, combine, head_groups, sm_count
from kvq_kernels.decode_attention.launch import run_kernels as attend_dense
from kvq_kernels.decode_attention.pages import gathered
from kvq_kernels.decode_attention.parts import Dense, Rope, Side
from kvq_kernels.decode_attention.reference import unpack_side
from kvq_kernels.launch_device import on_its_device
from kvq_kernels.transform_attention.arguments import EXACT_TILE, arguments, constants, window_sizes
from kvq_kernels.transform_attention.configs import Config, choose_splits
from kvq_kernels.transform_attention.kernel import split_kernel
from kvq_kernels.tuning import family

#: Programs for exact tokens at most.
MAX_EXACT_PROGRAMS = 8


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
    exact = max(1, min(MAX_EXACT_PROGRAMS, triton.cdiv(sum(window_sizes(keys)), EXACT_TILE)))
    if not fused(query, keys, values) or capacity(keys) == 0:
        return 0, exact
    config, launches = (
        Config.of(family(query.device), query.shape[2], keys.pages),
        len(head_groups(keys, values, query.device)),
    )
    pairs = triton.cdiv(query.shape[0] * kv_heads(keys), launches)
    tiles = triton.cdiv(capacity(keys), config.tokens)
    return choose_splits(pairs, tiles, exact, sm_count(query.device) * config.programs), exact


def plan_splits(query: Tensor, keys: Side, values: Side) -> int:
    """Results of each query head that a workspace holds."""
    return sum(programs(query, keys, values))


def new_workspace(query: Tensor, keys: Side, values: Side) -> Workspace:
    """Workspace for all tokens that there is room for."""
    return Workspace.like(query, max(1, plan_splits(query, keys, values) - 2))


def _dense_side(side: Side, query: Tensor) -> Side:
    """The side with its packed tokens as numbers of the query's type."""
    rows = gathered(side)
    return replace(rows, packed=Dense(unpack_side(rows, query.dtype, query.shape[2]).contiguous()))


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
    config = Config.of(gpu, query.shape[2], keys.pages)
    for group in head_groups(keys, values, query.device):
        split_kernel[(group.count, workspace.programs, len(query))](
            *arguments(query, group, lengths, scaling, rope, window, workspace, exact),
            **constants(query, group, rope, config, gpu),
            **config.options(),
        )
    combine(workspace, out)
    return out

"""Launches of rematerialization: spans of tokens, tiles, arguments of the three kernels, workspace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kvq_kernels.decode_attention.formats.format import head_strides
from kvq_kernels.decode_attention.launch import TYPES, capacity
from kvq_kernels.decode_attention.parts import Dense, Packed, PerHead, Rope, Uniform
from kvq_kernels.launch_device import on_its_device
from kvq_kernels.rematerialize.parts import Latents
from kvq_kernels.rematerialize.scores import score_kernel
from kvq_kernels.rematerialize.spec import Source
from kvq_kernels.rematerialize.sums import project_kernel, sum_kernel
from kvq_kernels.spans import PROJECTED_CHANNELS, GridLaunch, SpanCall, Workspace, count_splits, launch_kernel
from kvq_kernels.tuning import configuration, family

OPERATION = "rematerialize"


@dataclass(frozen=True)
class Call(SpanCall):
    """Arguments of one `rematerialize`, which its launches share."""

    keys: Latents
    values: Latents

    @property
    def kv_heads(self) -> int:
        return self.keys.weight.shape[1] // self.query.shape[2]

    @property
    def products(self) -> dict[str, Any]:
        """Compile-time arguments that set the type and precision of products."""
        dtype = TYPES[self.query.dtype]
        if knobs.runtime.interpret and dtype == tl.bfloat16:
            dtype = tl.float32  # the interpreter keeps bfloat16 as 16-bit integers, and multiplies those
        return {"T": dtype, "PRECISION": self.precision}


def pointers(side: Latents) -> tuple[tuple[Tensor | None, ...], tuple[int, ...], int]:
    """(tensors, strides of rows, ring_size), as `read.token_lines` takes them."""
    held, packed = side.held, side.held.packed
    codes, scale, zero = _stored(packed)
    tensors = (codes, scale, zero, side.first, held.sinks, held.ring)
    for tensor in tensors:
        if tensor is not None:
            head_strides(tensor)
    if zero is not None and scale is not None and zero.stride() != scale.stride():
        raise ValueError("the zero-points must be laid out as the scales are")
    strides = tuple(0 if x is None else x.stride(0) for x in (codes, scale, *tensors[3:]))
    return tensors, strides, 1 if held.ring is None else held.ring.shape[2]


def _stored(packed: Packed | PerHead) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(codes, scale, zero) of uniform codes, (numbers, None, None) of dense numbers."""
    if isinstance(packed, Uniform):
        return packed.codes, packed.scale, packed.zero
    assert isinstance(packed, Dense)
    return packed.numbers, None, None


def tile(call: Call, kernel: str, source: Source) -> dict[str, int]:
    """Tuned configuration of a kernel, with tiles that divide the groups."""
    config = configuration(OPERATION, f"{kernel}/{source.key}", call.gpu)
    if source.axis == "channel" and math.gcd(source.group, config["tokens"]) >= 16:
        config["tokens"] = math.gcd(source.group, config["tokens"])
    config["words"] = max(16, min(config["words"], triton.next_power_of_2(source.words)))
    return config


def score_launch(call: Call, source: Source, base: int, workspace: Workspace) -> GridLaunch:
    """Launch of `score_kernel` for the span that begins at token `base` of the source."""
    query, keys, config = call.query, call.keys, tile(call, "scores", source)
    rows, heads, dim = query.shape
    tensors, strides, ring_size = pointers(keys)
    norm = keys.norm
    args = (
        query,
        workspace.scores,
        call.lengths,
        keys.held.count,
        tensors,
        strides,
        keys.weight,
        keys.weight.stride(),
        keys.bias,
        None if norm is None else norm.weight,
        0.0 if norm is None else norm.epsilon,
        call.tables,
        ring_size,
        base,
        call.window or 0,
        call.base2_scaling,
        (source.words, source.fields),
    )
    constants = {
        "S": source,
        **call.rotation,
        "NORM": "none" if norm is None else norm.kind,
        **call.heads,
        "P": max(16, triton.next_power_of_2(dim // 2)),
        "SPAN": workspace.span,
        "N": config["tokens"],
        "R": config["words"],
        **call.products,
    }
    grid = (triton.cdiv(span_tokens(keys, source, base, workspace), config["tokens"]), heads // call.group, rows)
    return grid, args, constants, {"num_warps": config["warps"], "num_stages": config["stages"]}


def span_tokens(side: Latents, source: Source, base: int, workspace: Workspace) -> int:
    """Capacity of the span that begins at token `base`: lengths are known on the device alone."""
    return min(room(side, source) - base, workspace.span)


def room(side: Latents, source: Source) -> int:
    """Capacity of a source, in tokens of a row."""
    if source.kind != "exact":
        return capacity(side.held)
    return source.sinks + (0 if side.held.ring is None else side.held.ring.shape[2])


def fields(heads: int, source: Source, config: dict[str, int]) -> int:
    """Fields of a program of `sum_kernel`: as many as fit the accumulators of its threads, 32 per warp."""
    limit = config["accumulators"] * 32 * config["warps"] // (triton.next_power_of_2(heads) * config["words"])
    return max(1, min(source.fields, limit))


def sum_launch(call: Call, source: Source, base: int, workspace: Workspace, span_index: int) -> GridLaunch:
    """Launch of `sum_kernel` for the same span. span_index: number of spans before it."""
    config = tile(call, "sums", source)
    rows, heads, _ = call.query.shape
    tensors, strides, ring_size = pointers(call.values)
    buffers = workspace.scores, workspace.partial, *workspace.logsums(span_index)
    args = (*buffers, call.lengths, call.values.held.count)
    constants = {
        "S": source,
        "FIRST_SPAN": span_index == 0,
        "RANK": call.values.rank,
        "HEADS": heads,
        "Q": max(16, triton.next_power_of_2(heads)),
        "SPAN": workspace.span,
        "N": config["tokens"],
        "R": config["words"],
        "F": fields(heads, source, config),
        **call.products,
    }
    parts = triton.cdiv(source.words, constants["R"]) * (source.fields // constants["F"])
    options = {"num_warps": config["warps"], "num_stages": config["stages"]}
    return (parts, workspace.splits, rows), (*args, tensors, strides, ring_size, base), constants, options


def project_launch(call: Call, workspace: Workspace, span_index: int, out: Tensor) -> GridLaunch:
    """Launch of `project_kernel` after `span_index` spans."""
    values, (rows, _, dim) = call.values, call.query.shape
    logsum, _ = workspace.logsums(span_index)
    args = (workspace.partial, logsum, values.weight, values.weight.stride(), values.bias, out, workspace.splits)
    constants = {
        "RANK": values.rank,
        **call.heads,
        "SPLITS": triton.next_power_of_2(workspace.splits),
        "R": call.merged(workspace.splits),
        "C": PROJECTED_CHANNELS,
        **call.products,
    }
    grid = triton.cdiv(dim, PROJECTED_CHANNELS), call.kv_heads, rows
    return grid, args, constants, {"num_warps": 4, "num_stages": 2}


def plan_splits(query: Tensor, values: Latents) -> int:
    """`count_splits` of `sum_kernel`."""
    source = Source.packed(values)
    config = configuration(OPERATION, f"sums/{source.key}", family(query.device))
    parts = triton.cdiv(source.words, config["words"]) * (source.fields // fields(query.shape[1], source, config))
    return count_splits(query, parts, triton.cdiv(room(values, source), config["tokens"]))


def new_workspace(query: Tensor, values: Latents) -> Workspace:
    """Workspace with the tuned span and `plan_splits`."""
    config = configuration(OPERATION, f"scores/{Source.packed(values).key}", family(query.device))
    return Workspace.like(query, values.rank, config["span"], plan_splits(query, values))


@on_its_device
def run_kernels(
    query: Tensor,
    keys: Latents,
    values: Latents,
    lengths: Tensor,
    scaling: float,
    rope: Rope | None,
    window: int | None,
    workspace: Workspace | None,
    out: Tensor | None,
) -> Tensor:
    """`rematerialize` by the kernels, a span at a time: sinks and recent tokens, then packed tokens."""
    query = query.contiguous()
    call = Call(query, lengths, scaling, rope, window, family(query.device), keys, values)
    workspace = new_workspace(query, values) if workspace is None else workspace
    out = torch.empty_like(query) if out is None else out
    span_index = 0
    for key_source, value_source in (
        (Source.exact(keys), Source.exact(values)),
        (Source.packed(keys), Source.packed(values)),
    ):
        for base in range(0, room(keys, key_source), workspace.span):
            launch_kernel(score_kernel, score_launch(call, key_source, base, workspace))
            launch_kernel(sum_kernel, sum_launch(call, value_source, base, workspace, span_index))
            span_index += 1
    launch_kernel(project_kernel, project_launch(call, workspace, span_index, out))
    return out

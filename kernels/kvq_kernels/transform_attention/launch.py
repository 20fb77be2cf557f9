"""Launches of attention over transform codes: spans of tokens, tiles, arguments of the four kernels, workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvq_kernels.decode_attention.arguments import head_strides, pointers
from kvq_kernels.decode_attention.launch import NO_WINDOW, TAIL_TILE
from kvq_kernels.decode_attention.parts import Dense, Rope, Side
from kvq_kernels.decode_attention.spec import SideSpec, padded_dim
from kvq_kernels.launch_device import on_its_device
from kvq_kernels.spans import PROJECTED_CHANNELS, GridLaunch, SpanCall, Workspace, count_splits, launch_kernel
from kvq_kernels.transform_attention.parts import Steps, Transformed, TransformWorkspace
from kvq_kernels.transform_attention.scores import score_kernel
from kvq_kernels.transform_attention.sums import exact_kernel, project_kernel, sum_kernel
from kvq_kernels.tuning import configuration, family

OPERATION = "transform_attention"
MAX_EXACT_SPLITS = 8
#: Exact tokens of a program of `exact_kernel`, about.
EXACT_TOKENS = 2 * TAIL_TILE


@dataclass(frozen=True)
class Call(SpanCall):
    """Arguments of one `transform_attention`, which its launches share."""

    keys: Transformed
    values: Transformed

    @property
    def kv_heads(self) -> int:
        return self.keys.transform.mean.shape[0]

    @property
    def products(self) -> dict[str, Any]:
        """Compile-time arguments that set the type and precision of products with z.

        Chunks of components have unit variance: float16 keeps three bits more of them than bfloat16.
        """
        return {"T": tl.float32 if self.query.dtype == torch.float32 else tl.float16, "PRECISION": self.precision}

    def config(self, kernel: str) -> dict[str, int]:
        """Tuned configuration of a kernel."""
        return configuration(OPERATION, kernel, self.gpu)


def make_steps(
    counts: Mapping[int, Sequence[int]], channels: int, device: torch.device, gpu: str | None = None
) -> Steps:
    """`Steps.of` in the tuned size. gpu: family to run on; None: the device's."""
    return Steps.of(counts, channels, configuration(OPERATION, "steps", gpu or family(device))["words"], device)


def room(side: Transformed) -> int:
    """Packed tokens per row that there is room for: how many there are is known on the device alone."""
    return 0 if side.codes is None else side.codes.shape[2]


def codes_of(side: Transformed) -> tuple[Tensor, int, int]:
    """(codes, stride of rows, codes of a token). ValueError unless a row's tokens are contiguous."""
    codes = side.codes
    assert codes is not None
    return codes, head_strides(codes)[0], codes.shape[3]


def sinks_of(side: Side) -> int:
    """Number of sinks."""
    return 0 if side.sinks is None else side.sinks.shape[2]


def score_launch(call: Call, base: int, workspace: Workspace) -> GridLaunch:
    """Launch of `score_kernel` for the span that begins at packed token `base`."""
    keys, config = call.keys, call.config("scores")
    transform, (codes, stride, line) = keys.transform, codes_of(keys)
    tables = transform.centroids, transform.synthesis, transform.mean, transform.steps.groups, transform.steps.steps
    args = (
        call.query,
        workspace.scores,
        call.lengths,
        keys.exact.count,
        codes,
        stride,
        *tables,
        call.tables,
        base,
        call.window or 0,
        call.base2_scaling,
    )
    constants = {
        "SINKS": sinks_of(keys.exact),
        "LINE": line,
        "HEADS": transform.group_heads,
        **call.rotation,
        **call.heads,
        "P": max(16, triton.next_power_of_2(call.query.shape[2] // 2)),
        "SPAN": workspace.span,
        "N": config["tokens"],
        "R": transform.steps.words,
        **call.products,
    }
    tiles = triton.cdiv(min(room(keys) - base, workspace.span), config["tokens"])
    return (tiles, call.kv_heads, call.query.shape[0]), args, constants, _options(config)


def sum_launch(call: Call, base: int, workspace: Workspace, span_index: int) -> GridLaunch:
    """Launch of `sum_kernel` for the same span. span_index: number of spans before it."""
    values, config = call.values, call.config("sums")
    transform, (codes, stride, line) = values.transform, codes_of(values)
    queries = transform.group_heads * call.group
    args = (
        workspace.scores,
        workspace.partial,
        *workspace.logsums(span_index),
        values.exact.count,
        codes,
        stride,
        transform.centroids,
        transform.steps.steps,
        base,
    )
    constants = {
        "FIRST_SPAN": span_index == 0,
        "LINE": line,
        "COMPONENTS": workspace.partial.shape[3],
        "QUERIES": queries,
        "HEADS": call.query.shape[1],
        "Q": max(16, triton.next_power_of_2(queries)),
        "SPAN": workspace.span,
        "N": config["tokens"],
        "R": transform.steps.words,
        **call.products,
    }
    grid = transform.steps.steps.shape[0], workspace.splits, call.query.shape[0]
    return grid, args, constants, _options(config)


def exact_launch(call: Call, workspace: TransformWorkspace) -> GridLaunch:
    """Launch of `exact_kernel`."""
    config, rope, (rows, _, dim) = call.config("exact"), call.rope, call.query.shape
    keys, values = (_exact_side(side.exact) for side in (call.keys, call.values))
    (key_tensors, key_strides), (value_tensors, value_strides) = pointers(keys), pointers(values)
    args = (
        call.query,
        workspace.exact,
        workspace.exact_logsum,
        call.lengths,
        keys.count,
        NO_WINDOW if call.window is None else call.window,
        key_tensors,
        value_tensors,
        key_strides,
        value_strides,
        tuple(1 if side.ring is None else side.ring.shape[2] for side in (keys, values)),
        (None,) * 4 if rope is None else (rope.coarse, rope.fine, rope.fine_half, rope.offset),
        call.base2_scaling,
    )
    constants = {
        "SK": SideSpec.of(keys, dim),
        "SV": SideSpec.of(values, dim),
        **call.rotation,
        "GROUP": call.group,
        "M": triton.next_power_of_2(call.group),
        "SINKS": sinks_of(keys),
        "E": max(16, min(config["columns"], padded_dim(dim) // 2)),
        "PRECISION": call.precision,
        "N": TAIL_TILE,
    }
    return (call.kv_heads, workspace.exact_splits, rows), args, constants, _options(config)


def _exact_side(side: Side) -> Side:
    """The side with exact tokens in place of its packed ones, which the kernel does not read."""
    exact = side.sinks if side.ring is None else side.ring
    assert exact is not None
    return replace(side, packed=Dense(exact))


def project_launch(call: Call, workspace: TransformWorkspace, span_index: int, out: Tensor) -> GridLaunch:
    """Launch of `project_kernel` after `span_index` spans."""
    transform, (rows, _, dim) = call.values.transform, call.query.shape
    args = (
        workspace.partial,
        workspace.logsums(span_index)[0],
        workspace.exact,
        workspace.exact_logsum,
        transform.synthesis,
        transform.mean,
        transform.steps.groups,
        out,
        workspace.splits if span_index else 0,
        workspace.exact_splits,
    )
    constants = {
        "COMPONENTS": workspace.partial.shape[3],
        "HEADS": transform.group_heads,
        **call.heads,
        "SPLITS": triton.next_power_of_2(workspace.splits),
        "EXACT": triton.next_power_of_2(workspace.exact_splits),
        "R": call.merged(workspace.splits),
        "C": PROJECTED_CHANNELS,
        "PRECISION": call.precision,
    }
    grid = triton.cdiv(dim, PROJECTED_CHANNELS), call.kv_heads, rows
    return grid, args, constants, {"num_warps": 4, "num_stages": 2}


def _options(config: dict[str, int]) -> dict[str, int]:
    return {"num_warps": config["warps"], "num_stages": config["stages"]}


def plan_splits(query: Tensor, values: Transformed) -> int:
    """`count_splits` of `sum_kernel`."""
    config = configuration(OPERATION, "sums", family(query.device))
    tiles = triton.cdiv(room(values), config["tokens"])
    return count_splits(query, values.transform.steps.steps.shape[0], tiles)


def new_workspace(query: Tensor, values: Transformed) -> TransformWorkspace:
    """Workspace with the tuned span, and splits for all tokens that there is room for."""
    span = configuration(OPERATION, "scores", family(query.device))["span"]
    ring = values.exact.ring
    exact = sinks_of(values.exact) + (0 if ring is None else ring.shape[2])
    exact_splits = max(1, min(MAX_EXACT_SPLITS, triton.cdiv(exact, EXACT_TOKENS)))
    return TransformWorkspace.like(query, values.rank, span, plan_splits(query, values), exact_splits)


@on_its_device
def run_kernels(
    query: Tensor,
    keys: Transformed,
    values: Transformed,
    lengths: Tensor,
    scaling: float,
    rope: Rope | None,
    window: int | None,
    workspace: TransformWorkspace | None,
    out: Tensor | None,
) -> Tensor:
    """`transform_attention` by the kernels: exact tokens, then packed ones, a span at a time."""
    query = query.contiguous()
    call = Call(query, lengths, scaling, rope, window, family(query.device), keys, values)
    workspace = new_workspace(query, values) if workspace is None else workspace
    out = torch.empty_like(query) if out is None else out
    launch_kernel(exact_kernel, exact_launch(call, workspace))
    span_index = 0
    for base in range(0, room(keys), workspace.span):
        launch_kernel(score_kernel, score_launch(call, base, workspace))
        launch_kernel(sum_kernel, sum_launch(call, base, workspace, span_index))
        span_index += 1
    launch_kernel(project_kernel, project_launch(call, workspace, span_index, out))
    return out

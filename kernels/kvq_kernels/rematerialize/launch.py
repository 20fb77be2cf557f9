"""From tensors to launches: pointers, strides, types, tiles and spans."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kvq_kernels.decode_attention.launch import TYPES, capacity, float32_products, processors
from kvq_kernels.decode_attention.parts import Rope, Uniform
from kvq_kernels.rematerialize.parts import Latents, Workspace
from kvq_kernels.rematerialize.scores import score_kernel
from kvq_kernels.rematerialize.spec import Source
from kvq_kernels.rematerialize.sums import project_kernel, sum_kernel
from kvq_kernels.tuning import configuration, family

OPERATION = "rematerialize"
#: Numbers that a program of `project_kernel` adds up at once; output channels that it makes.
COMBINED, COLUMNS = 4096, 32
MOST_SPLITS = 16


@dataclass(frozen=True)
class Call:
    """One attention: what all launches of it share."""

    query: Tensor
    keys: Latents
    values: Latents
    lengths: Tensor
    scaling: float
    rope: Rope | None
    window: int | None
    gpu: str

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.query.shape[1] * self.query.shape[2] // self.keys.weight.shape[1]

    @property
    def products(self) -> dict[str, Any]:
        kind = TYPES[self.query.dtype]
        if knobs.runtime.interpret and kind == tl.bfloat16:
            kind = tl.float32  # the interpreter keeps bfloat16 as 16-bit integers, and multiplies those
        return {"T": kind, "PRECISION": float32_products(self.query.dtype, not self.gpu.startswith("gfx"))}


def pointers(side: Latents) -> tuple[tuple, tuple, int]:
    """(tensors, strides between rows, slots of the ring), as `read.token_lines` takes them."""
    held, packed = side.held, side.held.packed
    own = (packed.codes, packed.scale, packed.zero) if isinstance(packed, Uniform) else (packed.numbers, None, None)
    tensors = (*own, side.first, held.sinks, held.ring)
    for tensor in tensors:
        if tensor is not None and (tensor.stride(3) != 1 or tensor.stride(2) != tensor.shape[3]):
            raise ValueError(f"the tokens of a row must be contiguous, not of strides {tensor.stride()}")
    if own[2] is not None and own[2].stride() != own[1].stride():
        raise ValueError("the zero-points must be laid out as the scales are")
    strides = tuple(0 if x is None else x.stride(0) for x in (own[0], own[1], *tensors[3:]))
    return tensors, strides, 1 if held.ring is None else held.ring.shape[2]


def tile(call: Call, kernel: str, source: Source) -> dict[str, int]:
    """The table's configuration, with tiles that fit the groups."""
    found = configuration(OPERATION, f"{kernel}/{source.key}", call.gpu)
    if source.axis == "channel" and math.gcd(source.group, found["tokens"]) >= 16:
        found["tokens"] = math.gcd(source.group, found["tokens"])
    found["words"] = max(16, min(found["words"], triton.next_power_of_2(source.words)))
    return found


def score_launch(call: Call, source: Source, base: int, workspace: Workspace) -> tuple[tuple, tuple, dict, dict]:
    """(grid, arguments, constants, options) of `score_kernel` for a span of tokens."""
    query, keys, own = call.query, call.keys, tile(call, "scores", source)
    rows, heads, dim = query.shape
    tensors, strides, slots = pointers(keys)
    norm, rope = keys.norm, call.rope
    given = (
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
        (None, None, None) if rope is None else (rope.coarse, rope.fine, rope.offset),
        slots,
        base,
        call.window or 0,
        call.scaling * math.log2(math.e),
        (source.words, source.fields),
    )
    fixed = {
        "S": source,
        "STYLE": "none" if rope is None else rope.style,
        "WIDTH": 0 if rope is None else 2 * rope.frequencies.numel(),
        "NORM": "none" if norm is None else norm.kind,
        "D": dim,
        "P": max(16, triton.next_power_of_2(dim // 2)),
        "GROUP": call.group,
        "M": triton.next_power_of_2(call.group),
        "SPAN": workspace.span,
        "N": own["tokens"],
        "R": own["words"],
        **call.products,
    }
    grid = (triton.cdiv(span_tokens(keys, source, base, workspace), own["tokens"]), heads // call.group, rows)
    return grid, given, fixed, {"num_warps": own["warps"], "num_stages": own["stages"]}


def span_tokens(side: Latents, source: Source, base: int, workspace: Workspace) -> int:
    """Tokens from `base` on that a span may hold, by the room there is: lengths are on the device."""
    return min(room(side, source) - base, workspace.span)


def room(side: Latents, source: Source) -> int:
    """Tokens of a row that a source has room for."""
    if source.kind != "exact":
        return capacity(side.held)
    return source.sinks + (0 if side.held.ring is None else side.held.ring.shape[2])


def fields(heads: int, source: Source, own: dict[str, int]) -> int:
    """Fields of a program of `sum_kernel`: as many as its threads, 32 a warp, have accumulators for."""
    most = own["accumulators"] * 32 * own["warps"] // (triton.next_power_of_2(heads) * own["words"])
    return max(1, min(source.fields, most))


def sum_launch(
    call: Call, source: Source, base: int, workspace: Workspace, turn: int
) -> tuple[tuple, tuple, dict, dict]:
    """As `score_launch`, of `sum_kernel`; turn: how many spans came before."""
    own = tile(call, "sums", source)
    rows, heads, _ = call.query.shape
    tensors, strides, slots = pointers(call.values)
    before, after = workspace.logsum[turn % 2], workspace.logsum[(turn + 1) % 2]
    given = (workspace.scores, workspace.partial, before, after, call.lengths, call.values.held.count)
    fixed = {
        "S": source,
        "BEGINS": turn == 0,
        "RANK": call.values.rank,
        "HEADS": heads,
        "Q": max(16, triton.next_power_of_2(heads)),
        "SPAN": workspace.span,
        "N": own["tokens"],
        "R": own["words"],
        "F": fields(heads, source, own),
        **call.products,
    }
    parts = triton.cdiv(source.words, fixed["R"]) * (source.fields // fixed["F"])
    options = {"num_warps": own["warps"], "num_stages": own["stages"]}
    return (parts, workspace.splits, rows), (*given, tensors, strides, slots, base), fixed, options


def project_launch(call: Call, workspace: Workspace, turn: int, out: Tensor) -> tuple[tuple, tuple, dict, dict]:
    """As `score_launch`, of `project_kernel`."""
    values, (rows, heads, dim), group = call.values, call.query.shape, call.group
    members, splits = triton.next_power_of_2(group), triton.next_power_of_2(workspace.splits)
    logsum = workspace.logsum[turn % 2]
    given = (workspace.partial, logsum, values.weight, values.weight.stride(), values.bias, out, workspace.splits)
    fixed = {
        "RANK": values.rank,
        "D": dim,
        "GROUP": group,
        "M": members,
        "SPLITS": splits,
        "R": max(16, min(128, COMBINED // (members * splits))),
        "C": COLUMNS,
        **call.products,
    }
    return (triton.cdiv(dim, COLUMNS), heads // group, rows), given, fixed, {"num_warps": 4, "num_stages": 2}


def plan_splits(query: Tensor, values: Latents) -> int:
    """Splits of the tokens that give every multiprocessor two programs of `sum_kernel`, as far as there are tiles."""
    source = Source.packed(values)
    own = configuration(OPERATION, f"sums/{source.key}", family(query.device))
    parts = triton.cdiv(source.words, own["words"]) * (source.fields // fields(query.shape[1], source, own))
    wanted = triton.cdiv(2 * processors(query.device), parts * query.shape[0])
    return max(1, min(MOST_SPLITS, wanted, triton.cdiv(room(values, source), own["tokens"])))


def new_workspace(query: Tensor, values: Latents) -> Workspace:
    """With the table's span, and as many splits as suit the room that there is for tokens."""
    own = configuration(OPERATION, f"scores/{Source.packed(values).key}", family(query.device))
    return Workspace.like(query, values.rank, own["span"], plan_splits(query, values))


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
    """`rematerialize` by the kernels: first the tokens that are not packed, then the packed ones, a span at a time."""
    query = query.contiguous()
    call = Call(query, keys, values, lengths, scaling, rope, window, family(query.device))
    workspace = new_workspace(query, values) if workspace is None else workspace
    out = torch.empty_like(query) if out is None else out
    turn = 0
    for own_keys, own_values in (
        (Source.exact(keys), Source.exact(values)),
        (Source.packed(keys), Source.packed(values)),
    ):
        for base in range(0, room(keys, own_keys), workspace.span):
            _launch(score_kernel, score_launch(call, own_keys, base, workspace))
            _launch(sum_kernel, sum_launch(call, own_values, base, workspace, turn))
            turn += 1
    _launch(project_kernel, project_launch(call, workspace, turn, out))
    return out


def _launch(kernel, launch: tuple[tuple, tuple, dict, dict]) -> None:
    grid, given, fixed, options = launch
    kernel[grid](*given, **fixed, **options)

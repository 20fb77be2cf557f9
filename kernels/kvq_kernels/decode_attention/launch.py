"""From tensors to a launch: pointers, strides, types, splits and the workspace."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from kvq_kernels.decode_attention.configs import choose_splits, choose_tile
from kvq_kernels.decode_attention.kernel import REST_COST, combine_kernel, split_kernel
from kvq_kernels.decode_attention.parts import Codebook, Dense, PerHead, Rope, Side, Uniform
from kvq_kernels.decode_attention.spec import SideSpec, Tile, block_tokens, padded

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
#: Of multiprocessors, where there is no GPU to ask.
ASSUMED_PROCESSORS = 132
#: More tokens than any text has: no sliding window.
ENDLESS = 1 << 30


@dataclass
class Workspace:
    """What the splits leave for the combination. Kept between steps (and inside a captured graph), it never grows with
    the context: partial float32 `[B, Q, splits + 1, D]`, logsum float32 `[B, Q, splits + 1]`."""

    partial: Tensor
    logsum: Tensor

    @classmethod
    def like(cls, query: Tensor, splits: int) -> Workspace:
        rows, heads, dim = query.shape
        shape = (rows, heads, splits + 1)
        return cls(
            torch.empty(*shape, dim, dtype=torch.float32, device=query.device),
            torch.empty(shape, dtype=torch.float32, device=query.device),
        )

    @property
    def splits(self) -> int:
        return self.logsum.shape[2] - 1


def kv_heads(side: Side) -> int:
    if isinstance(side.packed, PerHead):
        return sum(map(len, side.packed.heads))
    return _codes(side.packed).shape[1]


def _codes(packed: Dense | Uniform | Codebook) -> Tensor:
    return packed.numbers if isinstance(packed, Dense) else packed.codes


def pointers(side: Side) -> tuple[tuple, tuple]:
    """The pointers and strides that `number.at_head` takes."""
    packed = side.packed
    if isinstance(packed, Dense):
        own, strides = (packed.numbers, None, None, None, None, None), (*_strides(packed.numbers), 0, 0, 0)
    elif isinstance(packed, Codebook):
        own = (packed.codes, packed.centroids, packed.mean, packed.std, packed.token_scale, packed.token_zero)
        token = 0 if packed.token_scale is None else packed.token_scale.stride(0)
        strides = (*_strides(packed.codes), 0, 0, token)
    else:
        own = (packed.codes, packed.scale, packed.zero, packed.sign, None, None)
        strides = (*_strides(packed.codes), *_strides(packed.scale), 0)
        for beside in (packed.zero, packed.sign):
            if beside is not None and beside.stride() != packed.scale.stride():
                raise ValueError("zero and sign must be laid out as the scale is")
    held = []
    for tensor in (side.sinks, side.ring):
        held += (0, 0) if tensor is None else _strides(tensor)
    held += (0, 0) if side.norm is None else side.norm.stride()[:2]
    sparse = (None,) * 3 if side.outliers is None else (side.outliers.index, side.outliers.value, side.outliers.start)
    held += (0, 0, 0) if side.outliers is None else _sparse_strides(*sparse)
    # What there is not is never read; a pointer that is None could not be returned by a kernel's function.
    tensors = tuple(
        own[0] if tensor is None else tensor for tensor in (*own, side.sinks, side.ring, side.norm, *sparse)
    )
    return tensors, (*strides[:4], strides[4], 0, *held)


def _strides(tensor: Tensor) -> tuple[int, int]:
    if tensor.stride(3) != 1 or (tensor.shape[2] > 1 and tensor.stride(2) != tensor.shape[3]):
        raise ValueError(f"the tokens of a head must be contiguous, not of strides {tensor.stride()}")
    return tensor.stride(0), tensor.stride(1)


def _sparse_strides(index: Tensor, value: Tensor, start: Tensor | None) -> tuple[int, int, int]:
    if _strides(index) != _strides(value):
        raise ValueError("an outlier's value must be laid out as its index is")
    if start is None:
        return *_strides(index), 0
    return index.stride(0), 0, _strides(start)[0]


def constants(
    query_type: torch.dtype,
    keys: Side,
    values: Side,
    rope: Rope | None,
    group: int,
    dim: int,
    tile: Tile,
    heads: int | None = None,
):
    """The compile-time arguments of `split_kernel`. heads: all kv heads, where the sides have but some of them."""
    nvidia = bool(tile.nvidia) and torch.version.hip is None
    ways = {"fenced": bool(tile.fences), "nvidia": nvidia}
    sk, sv = (replace(SideSpec.of(side, dim), **ways) for side in (keys, values))
    tokens = max(tile.tokens, 16)
    if "codebook" in (sk.kind, sv.kind):
        tokens = max(tokens, 16 * block_tokens(sk, sv))
    else:
        for spec in (sk, sv):
            if spec.axis == "channel" and math.gcd(spec.group, tokens) >= 16:
                tokens = math.gcd(spec.group, tokens)
    tokens = max([tokens, *(spec.block for spec in (sk, sv) if spec.slots)])
    return {
        "SK": sk,
        "SV": sv,
        "STYLE": "none" if rope is None else rope.style,
        "WIDTH": 0 if rope is None else 2 * rope.frequencies.numel(),
        "HEADS": kv_heads(keys) if heads is None else heads,
        "GROUP": group,
        "M": max(triton.next_power_of_2(group), tile.queries if {"codebook", "uniform"} & {sk.kind, sv.kind} else 1),
        "SINKS": 0 if keys.sinks is None else keys.sinks.shape[2],
        "N": tokens,
        "E": max(16, min(tile.columns, padded(dim) // 2)),
        "KD": product_type(keys, query_type),
        "VD": product_type(values, query_type),
        "PRECISION": float32_products(query_type, nvidia),
        "TAIL": 16,
        "STAGES": tile.stages,
    }


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
) -> tuple:
    """The other arguments of `split_kernel`."""
    (key_tensors, key_strides), (value_tensors, value_strides) = pointers(keys), pointers(values)
    return (
        query,
        workspace.partial,
        workspace.logsum,
        lengths,
        (keys.count, values.count),
        ENDLESS if window is None else window,
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
    """How float32 numbers are multiplied. NVIDIA's matrix units would cut them off after 11 bits, four times as far off
    as float16 rounds; three products of bfloat16 parts have 16 bits, in fewer registers than three of 11 bits."""
    exact = query_type == torch.float32 or not nvidia or knobs.runtime.interpret
    return "ieee" if exact else "bf16x3"


def product_type(side: Side, query_type: torch.dtype) -> tl.dtype:
    """Packed numbers are multiplied as float16, whose subnormal numbers are their codes; others as they are."""
    if query_type == torch.float32:
        return tl.float32
    own = TYPES[side.packed.numbers.dtype] if isinstance(side.packed, Dense) else tl.float16
    # The interpreter keeps bfloat16 as 16-bit integers, and multiplies those.
    return tl.float32 if knobs.runtime.interpret and own == tl.bfloat16 else own


def capacity(side: Side) -> int:
    packed = side.packed.members[0] if isinstance(side.packed, PerHead) else side.packed
    return _codes(packed).shape[2] * (packed.block[0] if isinstance(packed, Codebook) else 1)


def processors(device: torch.device) -> int:
    if device.type != "cuda":
        return ASSUMED_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan_splits(query: Tensor, keys: Side, values: Side, rope: Rope | None = None, tile: Tile | None = None) -> int:
    """Splits of each row and kv head: what a `Workspace` that is kept between calls is to have room for.

    They depend on how many tokens the stores and windows have room for, not on how many there are.
    """
    part, dim = alike(keys, values, query.device)[0], query.shape[2]
    tile = tile or choose_tile(query.device, SideSpec.of(part.keys, dim), SideSpec.of(part.values, dim))
    fixed = constants(query.dtype, part.keys, part.values, rope, 1, dim, tile)
    exact = fixed["SINKS"] + max(0 if side.ring is None else side.ring.shape[2] for side in (keys, values))
    tokens = min(capacity(keys), capacity(values)) + REST_COST.value * exact
    tiles = max(2, -(-tokens // fixed["N"]))
    return max(2, choose_splits(query.shape[0] * kv_heads(keys), tiles, processors(query.device), tile.waves)) - 1


@dataclass(frozen=True)
class Alike:
    """Kv heads whose keys are stored alike, and whose values are. heads: as in `split_kernel`; None: all, in order."""

    keys: Side
    values: Side
    heads: tuple[Tensor, Tensor, Tensor] | None
    count: int


def alike(keys: Side, values: Side, device: torch.device) -> list[Alike]:
    """The sides by heads that are stored alike."""
    if not any(isinstance(side.packed, PerHead) for side in (keys, values)):
        return [Alike(keys, values, None, kv_heads(keys))]
    members = [_members(side) for side in (keys, values)]
    found = []
    for key_packed, key_heads in members[0]:
        for value_packed, value_heads in members[1]:
            if heads := _shared(key_heads, value_heads, device):
                count = heads[0].numel()
                sides = replace(keys, packed=key_packed), replace(values, packed=value_packed)
                found.append(Alike(*sides, heads, count))
    return found


def _members(side: Side) -> list[tuple[Dense | Uniform | Codebook, tuple[int, ...]]]:
    if isinstance(side.packed, PerHead):
        return list(zip(side.packed.members, side.packed.heads, strict=True))
    return [(side.packed, tuple(range(kv_heads(side))))]


@cache
def _shared(
    keys: tuple[int, ...], values: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The heads of both, and their places in both; sent to the device once."""
    both = [head for head in keys if head in values]
    if not both:
        return None
    rows = (both, [keys.index(head) for head in both], [values.index(head) for head in both])
    return tuple(torch.tensor(row, dtype=torch.int32, device=device) for row in rows)


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
    """`decode_attention` by the kernels: one launch for each kind of storage that heads have, and the combination."""
    rows, heads, dim = query.shape
    group = heads // kv_heads(keys)
    query = query.contiguous()
    out = torch.empty_like(query) if out is None else out
    if workspace is None:
        workspace = Workspace.like(query, plan_splits(query, keys, values, rope, tile))
    for part in alike(keys, values, query.device):
        own = tile or choose_tile(query.device, SideSpec.of(part.keys, dim), SideSpec.of(part.values, dim))
        fixed = constants(query.dtype, part.keys, part.values, rope, group, dim, own, heads // group)
        split_kernel[(workspace.splits + 1, part.count, rows)](
            *arguments(query, part.keys, part.values, lengths, rope, scaling, workspace, window, part.heads),
            **fixed,
            **own.options(),
        )
    splits = workspace.splits
    wide = triton.next_power_of_2(dim)
    padded = triton.next_power_of_2(splits + 1)
    combine_kernel[(rows * heads,)](
        workspace.partial, workspace.logsum, out, splits + 1, D=dim, WIDE=wide, S=padded, num_warps=4
    )
    return out

"""Arguments of the kernel of attention over transform codes, from tensors; `launch.py` launches it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton import knobs

from kvq_kernels.decode_attention.arguments import kv_heads, pointers, side_spec
from kvq_kernels.decode_attention.formats.transformed import Operands, Transformed, lane_shifts
from kvq_kernels.decode_attention.launch import NO_WINDOW, HeadGroup, Workspace, exact_type, float32_products
from kvq_kernels.decode_attention.pages import page_strides
from kvq_kernels.decode_attention.parts import Dense, Rope, Side
from kvq_kernels.transform_attention.codes import FieldSpec
from kvq_kernels.transform_attention.configs import Config

#: Pairs of channels in a product, at least.
MIN_PAIRS = 16
#: Tokens of a tile of exact ones; pairs of channels of a column tile of these with RoPE.
EXACT_TILE, EXACT_PAIRS = 32, 32
#: Least number of query heads in a product, by the maker of the GPU.
MIN_QUERIES = {"nvidia": 8, "amd": 16}


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
    return replace(side, packed=Dense(exact), pages=None)


def _page_arguments(keys: Side, values: Side) -> tuple[Any, ...] | None:
    """`split_kernel`'s pages; None: rows are runs of memory."""
    if keys.pages is None or values.pages is None:
        return None
    given: list[Any] = []
    for side, pages in ((keys, keys.pages), (values, values.pages)):
        gain, table = _stored(side)[0].gain, pages.block_table
        gain_stride = 0 if gain is None else gain.stride(1) // 4
        given += [table, table.stride(0), page_strides(side)[0], gain_stride, pages.slots]
    return tuple(given)


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
        workspace.programs - exact_programs,
        group.heads,
        kv_heads(keys),
        len(key_operands.mean),
        len(value_operands.mean),
        0 if keys.pages is not None else packed_keys.room,
        _page_arguments(keys, values),
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
        "SK": side_spec(_exact_side(keys), dim, nvidia=nvidia),
        "SV": side_spec(_exact_side(values), dim, nvidia=nvidia),
        "STYLE": "none" if rope is None else rope.style,
        "WIDTH": 0 if rope is None else 2 * rope.frequencies.numel(),
        "D": dim,
        "GROUP": queries,
        "M": max(triton.next_power_of_2(queries), MIN_QUERIES["nvidia" if nvidia else "amd"]),
        "SINKS": window_sizes(keys)[0],
        "PAGE": 0 if keys.pages is None else keys.pages.block_size,
        "FIRST": 0 if keys.pages is None else keys.pages.first,
        "N": config.tokens,
        "E": min(config.pairs, max(MIN_PAIRS, triton.next_power_of_2(dim // 2))),
        "RELOAD": bool(config.reload),
        "HALF_SUMS": bool(config.half_sums),
        "ASSEMBLY": nvidia and not knobs.runtime.interpret,
        "PRECISION": float32_products(query.dtype, nvidia),
        "EXACT_TILE": EXACT_TILE,
        "EXACT_PAIRS": EXACT_PAIRS,
        "XD": exact_type(query.dtype),
        "STAGES": config.stages,
    }

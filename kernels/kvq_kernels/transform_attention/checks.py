"""Check the shapes and layouts that `transform_attention` assumes, without reading a tensor's numbers, which would wait
for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_kernels import fields
from kvq_kernels.decode_attention.checks import check_offset_and_out, check_per_row, check_workspace
from kvq_kernels.decode_attention.launch import Workspace
from kvq_kernels.decode_attention.parts import Rope
from kvq_kernels.transform_attention.parts import Transform, Transformed

TYPES = {32: torch.int32, 16: torch.int16, 8: torch.uint8}


def check_arguments(
    query: Tensor,
    keys: Transformed,
    values: Transformed,
    lengths: Tensor,
    rope: Rope | None,
    workspace: Workspace | None,
    out: Tensor | None,
) -> None:
    """ValueError for arguments that do not fit."""
    for name, side in (("keys", keys), ("values", values)):
        check_per_row(f"{name}.exact.count", side.exact.count, query)
        if side.exact.sinks is None and side.exact.ring is None:
            raise ValueError(f"{name} have neither sinks nor a ring buffer")
        _check_transform(name, side.transform, side.heads, *query.shape[1:])
        _check_codes(name, side, query, name == "keys")
    if keys.heads != values.heads:
        raise ValueError(f"keys have {keys.heads} heads, values {values.heads}")
    check_per_row("lengths", lengths, query)
    check_offset_and_out(rope, out, query)
    windows = [(side.sinks, side.room) for side in (keys, values)]
    if windows[0] != windows[1]:
        raise ValueError(f"keys have (sinks, room) = {windows[0]}, values {windows[1]}")
    rotation = None if rope is None else (rope.style, 2 * rope.frequencies.numel())
    if keys.transform.operands is not None and keys.transform.operands.rotation != rotation:
        made = keys.transform.operands.rotation
        raise ValueError(f"the keys' transform was made for the rotation {made}, not {rotation}: see Transform.of_keys")
    if workspace is not None:
        check_workspace(workspace, query)


def _check_transform(name: str, transform: Transform, kv_heads: int, heads: int, dim: int) -> None:
    """ValueError unless the tensors of a transform fit query heads of `dim` channels."""
    (groups, width), kept = transform.mean.shape, fields.FIELD * len(transform.widths)
    if groups * width != kv_heads * dim or groups not in (1, kv_heads) or dim % 2 or heads % kv_heads:
        raise ValueError(
            f"{heads} query heads of {dim} channels over {kv_heads} kv heads and {groups} transforms of {width} "
            f"channels ({name})"
        )
    if transform.synthesis.shape != (groups, width, kept) or transform.center.shape != (groups, kept):
        raise ValueError(
            f"with {len(transform.widths)} widths, the synthesis of {name} must be {[groups, width, kept]}, center "
            f"{[groups, kept]}, not {list(transform.synthesis.shape)} and {list(transform.center.shape)}"
        )


def _check_codes(name: str, side: Transformed, query: Tensor, keys: bool) -> None:
    """ValueError unless codes and gain are tensors as `fields` divides them."""
    if not side.codes:
        return
    parts, room, groups = fields.parts(fields.rate(side.transform.widths)), side.room, side.transform.mean.shape[0]
    lanes = (room, fields.KEY_LANES) if keys else (room // fields.BLOCK, fields.BLOCK // 2, fields.VALUE_LANES)
    expected = [((len(query), groups, *lanes, part.words), TYPES[part.bits]) for part in parts]
    given = [(tuple(x.shape), x.dtype) for x in side.codes]
    if given != expected or room % fields.BLOCK:
        raise ValueError(f"codes of {name} must be {expected}, with whole blocks of 16 tokens, not {given}")
    gain = side.gain
    if gain is not None and (gain.shape != (len(query), groups, room) or gain.dtype != torch.uint8):
        raise ValueError(f"the gain of {name} must be uint8 {[len(query), groups, room]}, not {list(gain.shape)}")
    if not all(x[0, 0].is_contiguous() for x in side.codes) or (gain is not None and not gain.is_contiguous()):
        raise ValueError(f"the codes of a head and all gains must be contiguous ({name}): pass contiguous tensors")

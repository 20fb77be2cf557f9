"""Check the shapes and layouts that `transform_attention` assumes, without reading a tensor's numbers, which would wait
for the device."""

from __future__ import annotations

import torch
from torch import Tensor

from kvq_kernels import fields
from kvq_kernels.decode_attention.arguments import kv_heads
from kvq_kernels.decode_attention.checks import check_offset_and_out, check_per_row, check_workspace
from kvq_kernels.decode_attention.formats.transformed import Transform, Transformed
from kvq_kernels.decode_attention.launch import Workspace, capacity
from kvq_kernels.decode_attention.pages import check_pages
from kvq_kernels.decode_attention.parts import Dense, PerHead, Rope, Side

TYPES = {32: torch.int32, 16: torch.int16, 8: torch.uint8}


def check_arguments(
    query: Tensor,
    keys: Side,
    values: Side,
    lengths: Tensor,
    rope: Rope | None,
    workspace: Workspace | None,
    out: Tensor | None,
) -> None:
    """ValueError for arguments that do not fit."""
    windows = []
    for name, side in (("keys", keys), ("values", values)):
        check_per_row(f"{name}.count", side.count, query)
        if side.sinks is None and side.ring is None:
            raise ValueError(f"{name} have neither sinks nor a ring buffer")
        if side.outliers is not None or side.norm is not None:
            raise ValueError(f"{name} have outliers or a norm, which transform_attention does not read")
        check_pages(name, side, len(query))
        _check_stored(name, side, query)
        windows.append((0 if side.sinks is None else side.sinks.shape[2], capacity(side)))
    if kv_heads(keys) != kv_heads(values):
        raise ValueError(f"keys have {kv_heads(keys)} heads, values {kv_heads(values)}")
    check_per_row("lengths", lengths, query)
    check_offset_and_out(rope, out, query)
    _check_both_paged(keys, values)
    if windows[0] != windows[1]:
        raise ValueError(f"keys have (sinks, room) = {windows[0]}, values {windows[1]}")
    rotation = None if rope is None else (rope.style, 2 * rope.frequencies.numel())
    for packed in keys.members:
        operands = packed.transform.operands if isinstance(packed, Transformed) else None
        if operands is not None and operands.rotation != rotation:
            raise ValueError(
                f"the keys' transform was made for the rotation {operands.rotation}, not {rotation}: see "
                "Transform.of_keys"
            )
    if workspace is not None:
        check_workspace(workspace, query)


def _check_both_paged(keys: Side, values: Side) -> None:
    """ValueError unless both sides or none have pages, of as many tokens, whole blocks, from the same place on."""
    sizes = [None if side.pages is None else (side.pages.block_size, side.pages.first) for side in (keys, values)]
    if sizes[0] != sizes[1] or (sizes[0] is not None and any(size % fields.BLOCK for size in sizes[0])):
        raise ValueError(
            f"keys and values have pages of (block_size, first) = {sizes[0]} and {sizes[1]}: both or none, the same, "
            f"multiples of {fields.BLOCK}"
        )


def _check_stored(name: str, side: Side, query: Tensor) -> None:
    """ValueError unless the packed tokens of all heads are codes of transforms that fit, or numbers."""
    window = side.sinks if side.ring is None else side.ring
    assert window is not None
    heads = window.shape[1]
    if query.shape[1] % heads:
        raise ValueError(f"{query.shape[1]} query heads over {heads} kv heads of {name}")
    counts = [heads]
    if isinstance(side.packed, PerHead):
        counts = list(map(len, side.packed.heads))
        served = sorted(head for member in side.packed.heads for head in member)
        if served != list(range(heads)) or len(counts) != len(side.members):
            raise ValueError(f"each of {heads} heads of {name} must be in one member, not {side.packed.heads}")
    for packed, count in zip(side.members, counts, strict=True):
        if isinstance(packed, Transformed):
            _check_transform(name, packed.transform, count, query.shape[2])
            _check_codes(name, packed, side, len(query), name == "keys")
        elif not isinstance(packed, Dense):
            raise ValueError(f"{name} are packed as {type(packed).__name__}, not as codes of a transform's components")


def _check_transform(name: str, transform: Transform, heads: int, dim: int) -> None:
    """ValueError unless the tensors of a transform fit so many kv heads of `dim` channels."""
    (groups, width), kept = transform.mean.shape, fields.FIELD * len(transform.widths)
    if groups * width != heads * dim or groups not in (1, heads) or dim % 2:
        raise ValueError(
            f"query heads of {dim} channels over {heads} kv heads and {groups} transforms of {width} channels ({name})"
        )
    if transform.synthesis.shape != (groups, width, kept) or transform.center.shape != (groups, kept):
        raise ValueError(
            f"with {len(transform.widths)} widths, the synthesis of {name} must be {[groups, width, kept]}, center "
            f"{[groups, kept]}, not {list(transform.synthesis.shape)} and {list(transform.center.shape)}"
        )


def _check_codes(name: str, packed: Transformed, side: Side, rows: int, keys: bool) -> None:
    """ValueError unless codes and gain are tensors as `fields` divides them, with the room of the side or of a page."""
    room = capacity(side)
    if side.pages is not None:
        rows, room = packed.codes[0].shape[0], side.pages.block_size
    parts, groups = fields.parts(fields.rate(packed.transform.widths)), packed.transform.mean.shape[0]
    lanes = (room, fields.KEY_LANES) if keys else (room // fields.BLOCK, fields.BLOCK // 2, fields.VALUE_LANES)
    expected = [((rows, groups, *lanes, part.words), TYPES[part.bits]) for part in parts]
    given = [(tuple(x.shape), x.dtype) for x in packed.codes]
    if given != expected or room % fields.BLOCK:
        raise ValueError(f"codes of {name} must be {expected}, with whole blocks of 16 tokens, not {given}")
    gain = packed.gain
    if gain is not None and (gain.shape != (rows, groups, room) or gain.dtype != torch.uint8):
        raise ValueError(f"the gain of {name} must be uint8 {[rows, groups, room]}, not {list(gain.shape)}")
    gains = gain is None or (gain.is_contiguous() if side.pages is None else gain.stride(2) == 1)
    if not all(x[0, 0].is_contiguous() for x in packed.codes) or not gains:
        raise ValueError(f"the codes of a head and all gains must be contiguous ({name}): pass contiguous tensors")

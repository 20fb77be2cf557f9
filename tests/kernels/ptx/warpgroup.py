"""Products of four warps (wgmma): right operands, and possibly left ones, are in shared memory, given by descriptors.

They are executed at once: results that are used before they are waited for are not detected.
"""

from __future__ import annotations

import re

import numpy as np

from ptx import warp
from ptx.block import Blocks
from ptx.numbers import decode
from ptx.program import Instruction

#: Period in bytes of the swizzle pattern of 16-byte pieces, by the descriptor's last two bits.
_SPANS = {0: 16, 1: 128, 2: 64, 3: 32}


def prepare(one: Instruction):
    """Function of a wgmma instruction."""
    if one.opcode[1] in ("fence", "commit_group", "wait_group"):
        return lambda blocks: None
    shape, sums, kind = one.opcode[4], one.opcode[-3], one.opcode[-1]
    match = re.fullmatch(r"m64n(\d+)k16", shape)
    if match is None or sums not in ("f32", "f16") or kind not in ("f16", "bf16"):
        raise NotImplementedError(str(one))
    columns = int(match[1])
    results, left, right, adds, *rest = one.operands
    signs, turned = [int(word) for word in rest[:2]], [int(word) for word in rest[2:]]
    if signs != [1, 1] or len(turned) != (1 if isinstance(left, tuple) else 2):
        raise NotImplementedError(str(one))

    def execute(blocks):
        active = blocks.active.reshape(-1, 128)
        if (active.any(1) != active.all(1)).any():
            raise NotImplementedError(f"{one} by some of four warps")
        own = active[:, 0]
        if isinstance(left, tuple):
            registers = [blocks.read(name, "b32").reshape(-1, 32) for name in left]
            a = warp.left16(registers, kind).reshape(-1, 64, 16)[own]
        else:
            a = _shared(blocks, left, 64, kind, bool(turned[0]), own)
        b = _shared(blocks, right, columns, kind, bool(turned[-1]), own)
        product = np.zeros((len(own), 64, columns))
        product[own] = a.astype(np.float64) @ b.astype(np.float64).transpose(0, 2, 1)
        product = product.reshape(-1, 16, columns)
        kept = blocks.read(adds, "pred").reshape(-1, 32)
        for i, name in enumerate(results):
            if sums == "f32":
                row, column = warp.GROUP + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * warp.WITHIN + i % 2
                before = blocks.read(name, "f32").reshape(-1, 32)
                found = np.where(kept, before, np.float32(0)) + product[:, row, column]
                written = found.astype(np.float32).view(np.uint32)
            else:  # two columns in a register
                row, column = warp.GROUP + 8 * (i % 2), 8 * (i // 2) + 2 * warp.WITHIN
                before = np.ascontiguousarray(blocks.read(name, "b32").astype(np.uint32)).view(np.float16)
                before = np.where(kept[..., None], before.reshape(-1, 32, 2), np.float16(0))
                found = before + np.stack([product[:, row, column], product[:, row, column + 1]], axis=-1)
                written = found.astype(np.float16).view(np.uint32)[..., 0]
            blocks.write(name, np.ascontiguousarray(written).reshape(-1))

    return execute


def _shared(blocks: Blocks, name: str, lines: int, kind: str, turned: bool, own: np.ndarray) -> np.ndarray:
    """[groups, lines, 16] numbers that a descriptor gives, for the groups of four warps `own`. turned: transposed, the
    16 numbers of a line are in different rows."""
    descriptor = blocks.read(name, "u64").reshape(-1, 128)[own, 0]
    begin, leading, stride = (((descriptor >> np.uint64(at)) & 0x3FFF).astype(np.int64) * 16 for at in (0, 16, 32))
    modes = {int(mode) for mode in descriptor >> np.uint64(62)}
    if len(modes) > 1 or ((descriptor >> np.uint64(49)) & 7).any():
        raise NotImplementedError("descriptors of several kinds")
    span = _SPANS[modes.pop()]
    begin, leading, stride = (x[:, None, None] for x in (begin, leading, stride))
    line, inner = np.arange(lines)[None, :, None], np.arange(16)[None, None, :]
    if turned:
        many = span // 2
        place = begin + line % many * 2 + line // many * leading + inner % 8 * span + inner // 8 * stride
    elif span == 16:
        place = begin + line % 8 * 16 + line // 8 * stride + inner % 8 * 2 + inner // 8 * leading
    else:
        place = begin + line % 8 * span + line // 8 * stride + inner * 2
    place ^= (place >> 7 & (span // 16 - 1)) << 4
    base = blocks.bases.reshape(-1, 128)[own, :1, None]
    blocks.shared.check(place.reshape(-1))
    raw = blocks.shared.bytes.view(np.uint16)[(base + place) // 2]
    return decode(raw.reshape(-1), kind).astype(np.float32).reshape(place.shape)

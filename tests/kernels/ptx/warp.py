"""Instructions that the 32 threads of a warp execute together, on arrays [warps, 32] of a register's bits."""

from __future__ import annotations

import numpy as np

from ptx.numbers import decode, tf32

_LANE = np.arange(32)
GROUP, WITHIN = _LANE // 4, _LANE % 4


def shuffle(mode: str, a: np.ndarray, which: np.ndarray, bounds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(value for each thread, whether its source is in its segment)."""
    clamp, mask = bounds & 31, (bounds >> 8) & 31
    lane = np.broadcast_to(_LANE.astype(np.uint32), a.shape)
    most = (lane & mask) | (clamp & ~mask & 31)
    least = lane & mask
    which = which & 31
    if mode == "up":
        source = lane.astype(np.int64) - which
        inside = source >= most
    elif mode == "down":
        source = lane.astype(np.int64) + which
        inside = source <= most
    else:
        source = (lane ^ which) if mode == "bfly" else least | (which & ~mask & 31)
        source = source.astype(np.int64)
        inside = source <= most
    source = np.where(inside, source, lane).astype(np.int64)
    return np.take_along_axis(a, source, 1), inside


def reduce(operation: str, kind: str, a: np.ndarray) -> np.ndarray:
    """The threads' numbers reduced to one, for all of them."""
    signed = a.view(np.int32) if kind == "s32" else a
    found = {
        "add": lambda: signed.sum(1, dtype=signed.dtype),
        "min": lambda: signed.min(1),
        "max": lambda: signed.max(1),
        "and": lambda: np.bitwise_and.reduce(signed, 1),
        "or": lambda: np.bitwise_or.reduce(signed, 1),
        "xor": lambda: np.bitwise_xor.reduce(signed, 1),
    }[operation]()
    return np.repeat(found.view(np.uint32)[:, None], 32, 1)


def _halves(registers: list[np.ndarray], kind: str) -> np.ndarray:
    """[warps, 8, 4, registers, 2]: both halves of the registers of each thread, by groups of four."""
    raw = np.stack(registers, 2)
    return decode(raw.reshape(-1), kind + "x2").reshape(-1, 8, 4, len(registers), 2)


def left16(registers, kind):
    """[warps, 16, 16] from four registers of pairs, which begin at rows 0, 8, 0, 8 and columns 0, 0, 8, 8."""
    numbers = _halves(registers, kind).reshape(-1, 8, 4, 2, 2, 2)
    return numbers.transpose(0, 4, 1, 3, 2, 5).reshape(-1, 16, 16)


def _right16(registers, kind):
    """[warps, 16, 8] from two registers of pairs."""
    return _halves(registers, kind).transpose(0, 3, 2, 4, 1).reshape(-1, 16, 8)


def _left8(registers):
    found = np.empty((registers[0].shape[0], 16, 8), np.float32)
    for i in range(4):
        found[:, GROUP + 8 * (i % 2), WITHIN + 4 * (i // 2)] = tf32(registers[i])
    return found


def _right8(registers):
    found = np.empty((registers[0].shape[0], 8, 8), np.float32)
    for i in range(2):
        found[:, WITHIN + 4 * i, GROUP] = tf32(registers[i])
    return found


def multiply(opcode: tuple[str, ...], a: list, b: list, c: list) -> list[np.ndarray]:
    """mma: 16 x 8 results in float32."""
    shape, kind = opcode[3], opcode[-2]
    if shape == "m16n8k16" and kind in ("f16", "bf16"):
        left, right = left16(a, kind), _right16(b, kind)
    elif shape == "m16n8k8" and kind == "tf32":
        left, right = _left8(a), _right8(b)
    else:
        raise NotImplementedError(".".join(opcode))
    product = left.astype(np.float64) @ right.astype(np.float64)
    found = []
    for i in range(4):
        own = product[:, GROUP + 8 * (i // 2), 2 * WITHIN + i % 2]
        found.append((own + c[i].view(np.float32)).astype(np.float32).view(np.uint32))
    return found


def from_rows(rows: np.ndarray, transposed: bool) -> np.ndarray:
    """Register [warps, 32] of pairs from a matrix [warps, 8, 8] of 16-bit numbers."""
    if transposed:
        rows = rows.transpose(0, 2, 1)
    low, high = rows[:, GROUP, 2 * WITHIN], rows[:, GROUP, 2 * WITHIN + 1]
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def to_rows(register: np.ndarray, transposed: bool) -> np.ndarray:
    found = np.empty((register.shape[0], 8, 8), np.uint16)
    found[:, GROUP, 2 * WITHIN] = register & np.uint32(0xFFFF)
    found[:, GROUP, 2 * WITHIN + 1] = register >> np.uint32(16)
    return found.transpose(0, 2, 1) if transposed else found

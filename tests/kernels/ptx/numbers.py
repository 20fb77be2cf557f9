"""PTX types as numpy types, and rounding. A register holds raw bits: an unsigned integer per thread."""

from __future__ import annotations

import numpy as np

#: Bits of registers, by the letters of their name.
WIDTHS = {"rs": 16, "r": 32, "f": 32, "rd": 64, "fd": 64, "p": 1, "rh": 16}
RAW = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
TYPES = {
    **{f"u{n}": RAW[n] for n in (8, 16, 32, 64)},
    **{f"b{n}": RAW[n] for n in (8, 16, 32, 64)},
    **{"s8": np.int8, "s16": np.int16, "s32": np.int32, "s64": np.int64},
    **{"f16": np.float16, "f32": np.float32, "f64": np.float64, "pred": np.bool_},
}
#: Types of two numbers in a register -> type of each.
PAIRS = {"f16x2": "f16", "bf16x2": "bf16"}


def width(kind: str) -> int:
    """Bits of a type."""
    if kind in PAIRS:
        return 32
    return 16 if kind == "bf16" else 1 if kind == "pred" else 8 * np.dtype(TYPES[kind]).itemsize


def decode(raw: np.ndarray, kind: str) -> np.ndarray:
    """Numbers of a type from raw bits [threads] of at least its width; pairs as [threads, 2], bfloat16 as float32."""
    if kind in PAIRS:
        return decode(np.ascontiguousarray(raw).view(np.uint16).reshape(-1, 2), PAIRS[kind])
    raw = raw if kind == "pred" else raw.astype(RAW[width(kind)], copy=False)
    if kind == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return raw if kind == "pred" else np.ascontiguousarray(raw).view(TYPES[kind])


def encode(numbers: np.ndarray, kind: str) -> np.ndarray:
    """Raw bits of numbers of a type; bfloat16 is rounded to nearest even, other numbers are of the type already."""
    if kind in PAIRS:
        return np.ascontiguousarray(encode(numbers, PAIRS[kind])).view(np.uint32).reshape(-1)
    if kind == "bf16":
        bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        return np.where(np.isnan(numbers), np.uint32(0x7FFF), rounded).astype(np.uint16)
    if kind == "pred":
        return np.asarray(numbers, np.bool_)
    return np.ascontiguousarray(numbers, TYPES[kind]).view(RAW[width(kind)])


def flush(numbers: np.ndarray) -> np.ndarray:
    """float32 with subnormal numbers replaced by zero (.ftz)."""
    return np.where(np.abs(numbers) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), numbers), numbers)


def tf32(raw: np.ndarray) -> np.ndarray:
    """float32 without the last 13 bits, which a matrix unit does not read."""
    return (raw & np.uint32(0xFFFFE000)).view(np.float32)


def round_tf32(numbers: np.ndarray) -> np.ndarray:
    """float32 rounded to tf32, to nearest, ties away from zero."""
    return tf32(numbers.view(np.uint32) + np.uint32(0x1000))


def immediate(text: str, kind: str):
    """A literal as numpy scalar of a type."""
    if text.startswith(("0f", "0F")) and len(text) == 10 or text.startswith(("0d", "0D")) and len(text) == 18:
        bits = int(text[2:], 16)
    else:
        bits = int(text.rstrip("U"), 0)
    if kind == "pred":
        return np.bool_(bits)
    return decode(np.array([bits & ((1 << width(kind)) - 1)], RAW[width(kind)]), kind)[0]

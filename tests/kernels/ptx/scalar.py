"""Instructions that each thread executes by itself: opcode -> function of its operands' numbers.

Operands are numpy arrays of the instruction's type, [threads] or, for pairs, [threads, 2].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx.numbers import TYPES, flush, round_tf32, width

Function = Callable[..., np.ndarray]
_INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


def _fused(a, b, c):
    """a b + c, rounded once. For float32 the product is exact in float64, whose sum has more than twice the bits of
    float32: one in 2^29 results is rounded differently."""
    kind = a.dtype
    exact = a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)
    return exact.astype(kind)


def _rounded_pairs(a, kind):
    """Pairs after an operation: bfloat16 is computed in float32, which `encode` rounds."""
    return a if kind.startswith("bf16") else a.astype(np.float16, copy=False)


def _quotient(a, b):
    """Integer quotient, rounded towards zero; anything for a division by zero."""
    safe = np.where(b == 0, 1, b).astype(b.dtype)
    found = a // safe
    return found + ((found < 0) & (found * safe != a)).astype(a.dtype)


def _bits_of(count, kind):
    """Shift: by the type's width or more gives 0, or the sign."""
    return np.minimum(count, width(kind) - 1)


def _left(kind):
    def shift(a, count):
        return np.where(count >= width(kind), a.dtype.type(0), a << _bits_of(count, kind).astype(a.dtype))

    return shift


def _right(kind):
    def shift(a, count):
        moved = a >> _bits_of(count, kind).astype(a.dtype)
        return moved if kind[0] == "s" else np.where(count >= width(kind), a.dtype.type(0), moved)

    return shift


def _field(kind):
    """bfe: `count` bits from bit `first` on, sign-extended."""

    def field(a, first, count):
        first, count = first & 255, count & 255
        places = first[..., None] + np.arange(32)
        raw = a.view(np.uint32)
        bits = (raw[:, None] >> np.minimum(places, 31).astype(np.uint32)) & 1
        bits = np.where((places <= 31) & (np.arange(32) < count[:, None]), bits, 0)
        if kind == "s32":
            top = np.minimum(first + count - 1, 31).astype(np.uint32)
            sign = np.where(count > 0, (raw >> top) & 1, 0)[:, None]
            beyond = (np.arange(32) >= count[:, None]) | (places > 31)
            bits = np.where(beyond, sign, bits)
        return (bits.astype(np.uint64) << np.arange(32, dtype=np.uint64)).sum(1).astype(np.uint32).view(a.dtype)

    return field


def _permute(a, b, selector):
    """prmt: four of the eight bytes of b and a."""
    pool = np.stack([a, b], 1).view(np.uint8).reshape(len(a), 8)
    found = np.empty((len(a), 4), np.uint8)
    for i in range(4):
        which = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = np.take_along_axis(pool, (which & 7).astype(np.int64)[:, None], 1)[:, 0]
        found[:, i] = np.where(which >= 8, np.where(byte >= 128, 255, 0), byte)
    return found.view(np.uint32).reshape(-1)


def _funnel(opcode: tuple[str, ...]) -> Function:
    """shf: 32 of the 64 bits of b and a, shifted."""

    def shift(a, b, count):
        count = count & 31 if "wrap" in opcode else np.minimum(count, 32)
        both = (b.astype(np.uint64) << np.uint64(32)) | a
        moved = both << count.astype(np.uint64) >> np.uint64(32) if "l" in opcode else both >> count.astype(np.uint64)
        return moved.astype(np.uint32)

    return shift


def _count(a):
    return np.unpackbits(a.view(np.uint8).reshape(len(a), -1), axis=1).sum(1).astype(np.uint32)


def table(operation: int) -> Function:
    """lop3: bit i of `operation` is the result where the bits of a, b, c are those of i."""

    def combine(a, b, c, *_):
        found = np.zeros_like(a)
        for i in range(8):
            if operation >> i & 1:
                found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
        return found

    return combine


#: Comparisons; those of the second half are also true for NaN.
_COMPARE: dict[str, Function] = {
    "eq": np.equal,
    "ne": lambda a, b: (a < b) | (a > b),
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "equ": lambda a, b: ~((a < b) | (a > b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(np.isnan(a) | np.isnan(b)),
    "nan": lambda a, b: np.isnan(a) | np.isnan(b),
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}


def comparison(name: str) -> Function:
    return _COMPARE[name]


def _float(base: str, opcode: tuple[str, ...], kind: str) -> Function:
    simple: dict[str, Function] = {
        "add": np.add,
        "sub": np.subtract,
        "mul": np.multiply,
        "div": np.divide,
        "fma": _fused,
        "mad": _fused,
        "neg": np.negative,
        "abs": np.abs,
        "min": np.minimum if "NaN" in opcode else np.fmin,
        "max": np.maximum if "NaN" in opcode else np.fmax,
        "ex2": np.exp2,
        "lg2": np.log2,
        "rcp": np.reciprocal,
        "sqrt": np.sqrt,
        "rsqrt": lambda a: 1 / np.sqrt(a),
        "sin": np.sin,
        "cos": np.cos,
    }
    found = simple[base]
    if "ftz" in opcode and kind == "f32":
        return lambda *numbers: flush(found(*map(flush, numbers)))
    if kind.startswith("bf16") and base in ("neg", "abs"):
        return found
    return lambda *numbers: (
        _rounded_pairs(found(*numbers), kind) if kind != "f32" and kind != "f64" else found(*numbers)
    )


def _integer(base: str, opcode: tuple[str, ...], kind: str) -> Function:
    if base in ("mul", "mad"):
        product = _product(opcode, kind)
        return product if base == "mul" else lambda a, b, c: product(a, b) + c
    simple: dict[str, Function] = {
        "add": np.add,
        "sub": np.subtract,
        "min": np.minimum,
        "max": np.maximum,
        "neg": np.negative,
        "abs": np.abs,
        "div": _quotient,
        "rem": lambda a, b: a - _quotient(a, b) * b,
        "shr": _right(kind),
        "shl": _left(kind),
        "bfe": _field(kind),
    }
    return simple[base]


def _product(opcode: tuple[str, ...], kind: str) -> Function:
    if "lo" in opcode:
        return np.multiply
    if width(kind) == 64:
        raise KeyError(kind)
    wide = TYPES[kind[0] + str(2 * width(kind))]
    if "wide" in opcode:
        return lambda a, b: a.astype(wide) * b.astype(wide)
    return lambda a, b: ((a.astype(wide) * b.astype(wide)) >> wide(width(kind))).astype(a.dtype)


#: Modifiers that change a result and are not executed.
_REFUSED = {"sat", "satfinite", "xorsign", "abs", "oob"}


def function(opcode: tuple[str, ...]) -> Function:
    """Function of an instruction. NotImplementedError for unsupported ones."""
    if _REFUSED.intersection(opcode[1:]):
        raise NotImplementedError(".".join(opcode))
    if "relu" in opcode:
        found = function(tuple(part for part in opcode if part != "relu"))
        return lambda *numbers: (result := found(*numbers)) * (result > 0)
    base, kind = opcode[0], opcode[-1]
    logic: dict[str, Function] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert}
    try:
        if base in logic:
            return logic[base]
        if base == "popc":
            return _count
        if base == "prmt":
            return _permute
        if base == "shf":
            return _funnel(opcode)
        if base == "shl":
            return _left(kind)
        if base == "shr":
            return _right(kind if kind[0] != "b" else "u" + kind[1:])
        if kind in _INTEGERS:
            return _integer(base, opcode, kind)
        return _float(base, opcode, kind)
    except KeyError:
        raise NotImplementedError(".".join(opcode)) from None


def convert(opcode: tuple[str, ...]) -> tuple[str, str, Function]:
    """(source type, destination type, conversion) of a cvt."""
    to, of = opcode[-2], opcode[-1]
    if to == "tf32":
        return of, "f32", round_tf32
    rounding = next((part for part in opcode if part in ("rni", "rzi", "rmi", "rpi")), None)

    def numbers(a):
        if rounding is not None:
            a = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[rounding](a)
            if to in _INTEGERS:
                limits = np.iinfo(TYPES[to])
                return np.clip(np.nan_to_num(a.astype(np.float64)), limits.min, limits.max).astype(TYPES[to])
        if "ftz" in opcode and of == "f32":
            a = flush(a)
        return a.astype(np.float32 if to == "bf16" else TYPES[to])

    return of, to, numbers


def pack(opcode: tuple[str, ...]) -> Function:
    """cvt of two numbers to a pair, the second in the lower half."""
    to = opcode[-2]
    if opcode[-1] != "f32":
        raise NotImplementedError(".".join(opcode))
    return lambda a, b: _rounded_pairs(np.stack([b, a], 1), to)

"""Maps each instruction to a function that executes it on `Blocks`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ptx import scalar, warp, warpgroup
from ptx.block import Blocks, Step
from ptx.numbers import PAIRS, RAW, encode, width
from ptx.program import Instruction, Program

#: Memory ordering and hints: without effect where instructions are executed one after the other.
_NOTHING = {"bar", "barrier", "fence", "membar", "griddepcontrol", "nanosleep", "setmaxnreg"}
_NOTHING |= {"prefetch", "discard", "createpolicy"}


def prepare(program: Program) -> list[Step]:
    """(instruction, its function) of a program. NotImplementedError for unsupported instructions."""
    return [(one, _prepared(one)) for one in program.code]


def _nothing(blocks: Blocks) -> None:
    pass


def _prepared(one: Instruction) -> Callable[[Blocks], None]:
    base = one.opcode[0]
    if one.parts or base in _NOTHING:
        return _nothing
    special = {
        "mov": _move,
        "cvt": _convert,
        "setp": _set_predicate,
        "set": _set,
        "selp": _select,
        "ld": _load,
        "st": _store,
        "shfl": _shuffle,
        "redux": _reduce,
        "mma": _multiply,
        "ldmatrix": _load_matrix,
        "stmatrix": _store_matrix,
        "cp": _copy,
        "lop3": _combine,
        "wgmma": warpgroup.prepare,
    }
    return special.get(base, _compute)(one)


def _compute(one: Instruction):
    kind = one.opcode[-1]
    compute = scalar.function(one.opcode)
    base, to = one.opcode[0], one.operands[0]
    kinds = [kind] * (len(one.operands) - 1)
    result = kind
    if "wide" in one.opcode:
        result = kind[0] + str(2 * width(kind))
        kinds[2:] = [result] * len(kinds[2:])
    elif base in ("shl", "shr"):
        kinds[1] = "u32"
    elif base == "bfe":
        kinds[1:] = ["u32", "u32"]
    elif base == "popc":
        result = "u32"
    signed = result[0] == "s"

    def execute(blocks):
        numbers = [blocks.read(name, own) for name, own in zip(one.operands[1:], kinds, strict=True)]
        blocks.write(to, encode(compute(*numbers), result), signed)

    return execute


def _combine(one: Instruction):
    compute = scalar.table(int(one.operands[4].rstrip("U"), 0))

    def execute(blocks):
        blocks.write(one.operands[0], compute(*(blocks.read(name, "b32") for name in one.operands[1:4])))

    return execute


def _move(one: Instruction):
    kind, (to, of) = one.opcode[-1], one.operands
    if isinstance(to, tuple):
        part = width(kind) // len(to)

        def execute(blocks):
            raw = np.ascontiguousarray(blocks.read(of, f"b{width(kind)}")).view(RAW[part]).reshape(-1, len(to))
            for i, name in enumerate(to):
                blocks.write(name, raw[:, i].copy())
    elif isinstance(of, tuple):
        part = f"b{width(kind) // len(of)}"

        def execute(blocks):
            raw = np.stack([blocks.read(name, part) for name in of], 1)
            blocks.write(to, np.ascontiguousarray(raw).view(RAW[width(kind)]).reshape(-1))
    else:

        def execute(blocks):
            blocks.write(to, encode(blocks.read(of, kind), kind))

    return execute


def _convert(one: Instruction):
    to = one.operands[0]
    if len(one.operands) == 3:
        pack = scalar.pack(one.opcode)

        def execute(blocks):
            blocks.write(to, encode(pack(*(blocks.read(name, "f32") for name in one.operands[1:])), one.opcode[-2]))
    else:
        of, result, numbers = scalar.convert(one.opcode)

        def execute(blocks):
            blocks.write(to, encode(numbers(blocks.read(one.operands[1], of)), result), result[0] == "s")

    return execute


def _set_predicate(one: Instruction):
    compare, kind = scalar.comparison(one.opcode[1]), one.opcode[-1]
    to, a, b = one.operands
    each = to.split("|")
    if len(each) != 1 + (kind in PAIRS):
        raise NotImplementedError(str(one))

    def execute(blocks):
        there = compare(blocks.read(a, kind), blocks.read(b, kind)).reshape(blocks.count, -1)
        for i, name in enumerate(each):
            blocks.write(name, there[:, i])

    return execute


def _set(one: Instruction):
    compare, (result, kind) = scalar.comparison(one.opcode[1]), one.opcode[-2:]
    to, a, b = one.operands

    def execute(blocks):
        there = compare(blocks.read(a, kind), blocks.read(b, kind))
        blocks.write(to, encode(np.where(there, 1.0, 0.0).astype(np.float16), result))

    if result != "f16x2":
        raise NotImplementedError(str(one))
    return execute


def _select(one: Instruction):
    kind, (to, a, b, which) = f"b{width(one.opcode[-1])}", one.operands

    def execute(blocks):
        blocks.write(to, np.where(blocks.read(which, "pred"), blocks.read(a, kind), blocks.read(b, kind)))

    return execute


def _several(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return names if isinstance(names, tuple) else (names,)


def _load(one: Instruction):
    to, where, kind = _several(one.operands[0]), one.operands[1], one.opcode[-1]
    size, space = width(kind) // 8, one.opcode[1]

    def execute(blocks):
        address = blocks.address(where, space)[blocks.active]
        found = np.zeros((blocks.count, len(to)), RAW[8 * size])
        if space == "shared":
            found[blocks.active] = blocks.shared.load(address, size, len(to), blocks.warps[blocks.active])
        else:
            found[blocks.active] = blocks.memory.load(address, size, len(to))
        for i, register in enumerate(to):
            blocks.write(register, found[:, i].copy(), kind[0] == "s")

    def passed(blocks):
        raw = np.full(blocks.count, blocks.parameters[where[1:-1]], np.uint64)
        blocks.write(to[0], raw.astype(RAW[8 * size]), kind[0] == "s")

    if space not in ("param", "shared", "global"):
        raise NotImplementedError(str(one))
    return passed if space == "param" else execute


def _store(one: Instruction):
    where, names, kind = one.operands[0], _several(one.operands[1]), f"b{width(one.opcode[-1])}"
    space = one.opcode[1]

    def execute(blocks):
        numbers = np.stack([blocks.read(name, kind) for name in names], 1)[blocks.active]
        address = blocks.address(where, space)[blocks.active]
        if space == "shared":
            blocks.shared.store(address, numbers, blocks.warps[blocks.active])
        else:
            blocks.memory.store(address, numbers)

    if space not in ("shared", "global"):
        raise NotImplementedError(str(one))
    return execute


def _of_warps(raw: np.ndarray) -> np.ndarray:
    return raw.reshape(-1, 32)


def _shuffle(one: Instruction):
    to, _, inside_to = one.operands[0].partition("|")
    mode = one.opcode[2]

    def execute(blocks):
        a, which, bounds = (_of_warps(blocks.read(name, "b32")) for name in one.operands[1:4])
        found, inside = warp.shuffle(mode, a, which, bounds)
        blocks.write(to, found.reshape(-1))
        if inside_to:
            blocks.write(inside_to, inside.reshape(-1))

    return execute


def _reduce(one: Instruction):
    def execute(blocks):
        found = warp.reduce(one.opcode[2], one.opcode[-1], _of_warps(blocks.read(one.operands[1], "b32")))
        blocks.write(one.operands[0], found.reshape(-1))

    return execute


def _multiply(one: Instruction):
    def execute(blocks):
        a, b, c = ([_of_warps(blocks.read(name, "b32")) for name in names] for names in one.operands[1:])
        for name, raw in zip(one.operands[0], warp.multiply(one.opcode, a, b, c), strict=True):
            blocks.write(name, raw.reshape(-1))

    return execute


def _rows(blocks: Blocks, where: str, i: int) -> tuple[np.ndarray, np.ndarray]:
    """(addresses of the eight rows of matrix i of each warp, their warps)."""
    address = _of_warps(blocks.address(where, "shared"))[:, 8 * i : 8 * i + 8]
    return address, _of_warps(blocks.warps)[:, 8 * i : 8 * i + 8]


def _whole(blocks: Blocks, one: Instruction) -> np.ndarray:
    """Warps whose threads are all active, [warps]."""
    active = _of_warps(blocks.active)
    if (active.any(1) != active.all(1)).any():
        raise NotImplementedError(f"{one} by a part of a warp")
    return active[:, 0]


def _load_matrix(one: Instruction):
    to, where = _several(one.operands[0]), one.operands[1]

    def execute(blocks):
        own = _whole(blocks, one)
        for i, name in enumerate(to):
            address, warps = _rows(blocks, where, i)
            rows = np.zeros((len(own), 8, 8), np.uint16)
            rows[own] = blocks.shared.load(address[own].reshape(-1), 2, 8, warps[own].reshape(-1)).reshape(-1, 8, 8)
            blocks.write(name, warp.from_rows(rows, "trans" in one.opcode).reshape(-1))

    return execute


def _store_matrix(one: Instruction):
    where, names = one.operands[0], _several(one.operands[1])

    def execute(blocks):
        own = _whole(blocks, one)
        for i, name in enumerate(names):
            address, warps = _rows(blocks, where, i)
            rows = warp.to_rows(_of_warps(blocks.read(name, "b32")), "trans" in one.opcode)
            blocks.shared.store(address[own].reshape(-1), rows[own].reshape(-1, 8), warps[own].reshape(-1))

    return execute


def _copy(one: Instruction):
    """cp.async: the copy is done when it is waited for, not before."""
    if one.opcode[2] == "commit_group":
        return lambda blocks: blocks.copies.append([])
    if one.opcode[2] in ("wait_group", "wait_all"):
        left = int(one.operands[0]) if one.operands else 0

        def execute(blocks):
            pending = blocks.copies[-1:] if one.opcode[2] == "wait_group" else []
            done = blocks.copies[: len(blocks.copies) - len(pending)]
            kept = done[len(done) - left :] if left else []
            for group in done[: len(done) - len(kept)]:
                for address, numbers, warps in group:
                    blocks.shared.store(address, numbers, warps)
            blocks.copies = [*kept, *(pending or [[]])]

        return execute
    to, of, size = one.operands[0], one.operands[1], int(one.operands[2], 0)
    count = one.operands[3] if len(one.operands) > 3 else str(size)

    def execute(blocks):
        real = blocks.active & (blocks.read(count, "u32") > 0)
        if (blocks.read(count, "u32")[real] != size).any():
            raise NotImplementedError(f"{one} of a part")
        numbers = np.zeros((blocks.count, size), np.uint8)
        if real.any():
            words = blocks.memory.load(blocks.address(of, "global")[real], 4, size // 4)
            numbers[real] = np.ascontiguousarray(words).view(np.uint8)
        address = blocks.address(to, "shared")[blocks.active]
        blocks.copies[-1].append((address, numbers[blocks.active], blocks.warps[blocks.active]))

    return execute

"""Execution of many thread blocks at once: a register is an array of its bits in all threads.

Diverged threads are executed in turn, those furthest behind first, and continue together where they meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ptx.memory import Fault, Global, Shared
from ptx.numbers import RAW, WIDTHS, decode, immediate, width
from ptx.program import Instruction

_ENDLESS = 50_000_000
Step = tuple[Instruction, Callable[["Blocks"], None]]


def _register_width(name: str) -> int:
    return WIDTHS[name[1:].rstrip("0123456789")]


class Blocks:
    """Blocks of threads at `places` (x, y, z) of a grid, with `parameters` (bits, by name).

    active: [threads of all blocks], those that the current instruction is executed for; full: all of them.
    """

    def __init__(
        self,
        threads: int,
        places: Sequence[Sequence[int]],
        grid: Sequence[int],
        parameters: dict[str, int],
        memory: Global,
        shared: int,
    ) -> None:
        self.blocks, self.count = len(places), threads * len(places)
        lane = np.arange(self.count)
        self.warps = lane // 32
        self.memory, self.shared = memory, Shared(shared, self.blocks, threads // 32)
        self.bases = lane // threads * self.shared.size
        self.parameters = parameters
        self.active, self.full = np.ones(self.count, np.bool_), True
        self.copies: list[list[tuple]] = [[]]
        special = {"tid.x": lane % threads, "laneid": lane % 32, "warpid": lane % threads // 32}
        special |= {f"ctaid.{axis}": np.repeat([place[i] for place in places], threads) for i, axis in enumerate("xyz")}
        special |= {f"nctaid.{axis}": np.full(self.count, grid[i]) for i, axis in enumerate("xyz")}
        special |= {f"ntid.{axis}": np.full(self.count, threads if axis == "x" else 1) for axis in "xyz"}
        self.registers = {"%" + name: value.astype(np.uint32) for name, value in special.items()}
        self._written: dict[tuple[str, str], np.ndarray] = {}

    def read(self, operand: str, kind: str) -> np.ndarray:
        """Numbers of a type, read-only: of a register, a literal, or the address of a shared array."""
        if operand.startswith("%"):
            raw = self.registers.get(operand)
            if raw is None:  # never written: arbitrary bits that a test notices
                raw = np.full(self.count, -1, np.int64).astype(RAW[_register_width(operand)])
            return decode(raw, kind)
        if (operand, kind) not in self._written:
            if operand[0].isalpha() or operand[0] in "_$":
                number = np.zeros((), RAW[width(kind)])
            else:
                number = immediate(operand, kind)
            self._written[operand, kind] = np.broadcast_to(number, (self.count, *np.shape(number))).copy()
        return self._written[operand, kind]

    def write(self, name: str, raw: np.ndarray, signed: bool = False) -> None:
        """Write bits to a register in the active threads; a wider register is sign- or zero-extended."""
        if name == "_":
            return
        own = RAW[_register_width(name)]
        if raw.dtype != own:
            raw = (raw.view(f"i{raw.itemsize}") if signed else raw).astype(own)
        if not self.full and name in self.registers:
            raw = np.where(self.active, raw, self.registers[name])
        self.registers[name] = raw

    def address(self, operand: str, space: str) -> np.ndarray:
        """int64 [threads] of `[register + offset]`; shared addresses count through all blocks."""
        base, _, offset = operand[1:-1].replace(" ", "").partition("+")
        found = np.full(self.count, int(offset or "0", 0))
        if base.startswith("%"):
            found += self.registers[base].astype(np.int64)
        if space == "shared":
            self.shared.check(found[self.active])
            found += self.bases
        return found

    def run(self, program: Sequence[Step]) -> None:
        """Execute until all threads have returned. Raises Fault for what a device or its memory checker would
        report."""
        end = len(program)
        self.places, self.waiting = np.zeros(self.count, np.int64), np.zeros(self.count, np.bool_)
        at, meeting = self._choose(end)
        for _ in range(_ENDLESS):
            if at == meeting:
                self.places[self.active] = at
                at, meeting = self._choose(end)
            if at == end:
                return
            one, execute = program[at]
            current, full = self.active, self.full
            if one.guard is not None:
                name, negated = one.guard
                mask = current & (self.registers[name] ^ negated)
                self.active, self.full = mask, False
            at += 1
            if one.parts or one.waits:
                self.places[current] = at
                self.places[self.active] = end if one.ends else one.target if one.parts else at
                self.waiting |= self.active & one.waits
                at, meeting = self._choose(end)
                continue
            if self.full or self.active.any():
                try:
                    execute(self)
                except (Fault, NotImplementedError, KeyError) as error:
                    raise type(error)(f"{error} (instruction {at - 1}: {one})") from None
            self.active, self.full = current, full
        raise Fault("the kernel does not end")

    def _choose(self, end: int) -> tuple[int, int]:
        """(instruction of the threads to continue, which become active; where they may meet others).

        Blocks whose threads all wait at a barrier, or have returned, pass it.
        """
        going = self.places < end
        if self.waiting.any():
            held = ~(going & ~self.waiting).reshape(self.blocks, -1).any(1)
            held &= self.waiting.reshape(self.blocks, -1).any(1)
            self.shared.barrier(held)
            self.waiting.reshape(self.blocks, -1)[held] = False
        going &= ~self.waiting
        if not going.any():
            return end, -1
        at = int(self.places[going].min())
        self.active = going & (self.places == at)
        self.full = bool(self.active.all())
        others = going & (self.places > at)
        return at, int(self.places[others].min()) if others.any() else -1

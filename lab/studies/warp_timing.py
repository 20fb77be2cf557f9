"""Follow warps through machine code of sm_90 and count their cycles, without a GPU.

An instruction carries how the compiler scheduled it: cycles until the warp's next one, and the scoreboards on which it
waits for results without a fixed latency. `cycles` follows warps of one of the four sub-cores of a multiprocessor
through their instructions, in order: one instruction a cycle for all warps, each unit busy as long as `UNITS` says,
results of memory, MUFU and tensor cores after `LATENCIES`. HGMMA waits in a queue of the tensor core, and HMMA of other
warps behind it. Not modelled: caches, bank conflicts, queues of the memory system. The other sub-cores run the same.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kvq_kernels import machine_code

#: Products and sums of 16-bit numbers of a sub-core and cycle: 989e12 / 2 / (132 x 4 x 1.83e9), NVIDIA's data sheet.
TENSOR_MACS = 512
#: Share of it that HMMA reaches, unlike HGMMA: 63 %, Luo et al., arXiv:2402.13499.
HMMA_SHARE = 0.63
#: Cycles of an instruction of 32 threads in a unit of a sub-core, from results per cycle and multiprocessor in the CUDA
#: C++ Programming Guide (throughput of native arithmetic instructions, 9.0); pairs of 16-bit numbers: as the compiler
#: spaces them. Loads and stores: of 4 bytes a thread.
UNITS = {
    "alu": (2, "LOP3 SHF IADD3 LEA ISETP SEL FSETP FSEL FMNMX IMNMX VIMNMX PRMT VIADD F2FP SGXT PLOP3 MOV CS2R BMSK"),
    "fma": (1, "FFMA FMUL FADD"),
    "fma, half rate": (2, "IMAD HFMA2 HMUL2 HADD2"),
    "mufu": (8, "MUFU"),
    "memory": (4, "LDG LDS LDSM LDGSTS STS STSM STG SHFL"),
}
_UNIT_OF = {op: (unit.split(",")[0], cost) for unit, (cost, ops) in UNITS.items() for op in ops.split()}
#: Cycles until a result is there. Memory, level-2 cache: measured on a GH200, whose GPU is the same, by
#: github.com/markdewing/AI_kernels/tree/main/latency. Others (shared memory, shuffles, MUFU, barriers, the last HGMMA):
#: assumed to be somewhat longer than what the compiler leaves for HMMA.
LATENCIES = {"memory": 690, "level 2": 281, "short": 30}
#: Cycles after which an instruction has read its operands.
OPERANDS_READ = 12
#: Iterations of a loop that are followed, and those before the ones that count.
ITERATIONS, WARM_UP = 10, 4


@dataclass(frozen=True)
class Instruction:
    """stall: cycles to the warp's next instruction. writes, reads: the scoreboard that is busy until the result is
    written, the operands are read (7: none). waits: scoreboards that must be free before."""

    text: str
    stall: int
    writes: int
    reads: int
    waits: tuple[int, ...]

    @cached_property
    def opcode(self) -> str:
        """With suffixes, without a predicate."""
        return re.sub(r"^@!?U?P\w+\s+", "", self.text).split()[0]

    @cached_property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @cached_property
    def unit(self) -> tuple[str, float]:
        """Unit, and the cycles that it is busy."""
        if sizes := re.match(r"HGMMA\.64x(\d+)x(\d+)|HMMA\.(16)(8)(\d+)", self.opcode):
            m, n, k = (16, *sizes.groups()[:2]) if sizes[1] else sizes.groups()[2:]
            return "tensor", int(m) * int(n) * int(k) / TENSOR_MACS / (1 if sizes[1] else HMMA_SHARE)
        unit, cost = _UNIT_OF.get(self.name, ("other", 1))
        if unit == "memory" and (wide := re.search(r"\.(64|128)\b|M88\.([24])", self.opcode)):
            cost *= {"64": 2, "128": 4, "2": 2, "4": 4}[wide[1] or wide[2]]
        return unit, cost


@dataclass(frozen=True)
class Code:
    """Instructions of a kernel, and the loops among them as (first, last) indices, the last one a jump to the first."""

    instructions: list[Instruction]
    loops: list[tuple[int, int]]

    def regions(self) -> list[tuple[int, int]]:
        """Split the code at EXIT, where a branch of the source returns: (first, last) of each part."""
        ends = [at for at, one in enumerate(self.instructions) if one.text == "EXIT"]
        return list(zip([0, *(end + 1 for end in ends)], ends, strict=False))

    def body(self, loop: tuple[int, int]) -> list[Instruction]:
        """The instructions of a loop."""
        return self.instructions[loop[0] : loop[1] + 1]

    def trace(self, first: int, last: int, trips: Callable[[tuple[int, int]], int]) -> Iterator[Instruction]:
        """Yield instructions `first` to `last`, loops in them `trips(loop)` times; jumps forward are not taken."""
        at = first
        while at <= last:
            inside = [loop for loop in self.loops if loop[0] == at and loop[1] <= last and loop != (first, last)]
            if inside:
                loop = max(inside)
                for _ in range(trips(loop)):
                    yield from self.trace(*loop, trips)
                at = loop[1] + 1
            else:
                yield self.instructions[at]
                at += 1


def read(cubin: bytes) -> Code:
    """Disassemble a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(machine_code.TOOLS / "nvdisasm"), "-c", "-hex", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    labels: dict[str, int] = {}
    instructions: list[Instruction] = []
    loops, waiting = [], ""
    for line in text.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif op := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            waiting = op[1]
        elif waiting and (word := re.match(r"\s*/\* 0x([0-9a-f]{16}) \*/", line)):
            control = int(word[1], 16) >> 41  # bits 105 to 121: stall, yield, writes, reads, waits
            waits = tuple(board for board in range(6) if control >> (11 + board) & 1)
            target = re.search(r"\bBRA.*(\.L_x_\d+)", waiting)
            if target and target[1] in labels and labels[target[1]] < len(instructions):
                loops.append((labels[target[1]], len(instructions)))
            instructions.append(Instruction(waiting, control & 15, control >> 5 & 7, control >> 8 & 7, waits))
            waiting = ""
    return Code(instructions, loops)


@dataclass
class _Warp:
    """at: index of the next instruction, from cycle `time` on at the earliest. boards: when each scoreboard is free.
    copies: when each group of asynchronous copies is there. products: when all HGMMA are done."""

    at: int = 0
    time: float = 0.0
    boards: list[float] = field(default_factory=lambda: [0.0] * 6)
    copies: list[float] = field(default_factory=list)
    products: float = 0.0

    def ready(self, one: Instruction) -> float:
        """Find the cycle from which the warp may issue an instruction."""
        ready = max([self.time, *(self.boards[board] for board in one.waits)])
        if one.name == "DEPBAR" and (most := re.search(r"SB0, 0x([0-9a-f]+)", one.text)):
            ready = max([ready, *self.copies[: max(0, len(self.copies) - int(most[1], 16))]])
        return max(ready, self.products) if one.opcode.startswith("WARPGROUP.DEPBAR") else ready

    def issue(self, one: Instruction, now: float, done: float, latency: int) -> None:
        """Issue an instruction whose unit is `done` with it."""
        self.at, self.time = self.at + 1, now + max(1, one.stall)
        if one.name == "LDGDEPBAR":
            self.copies.append(now + latency)
        elif one.name == "HGMMA":
            self.products = done + LATENCIES["short"]
        elif one.writes < 6:
            wait = latency if one.name in ("LDG", "LD") else LATENCIES["short"]
            self.boards[one.writes] = max(self.boards[one.writes], done + wait)
        if one.reads < 6:
            self.boards[one.reads] = max(self.boards[one.reads], done + OPERANDS_READ)
        if one.name == "BAR":
            self.time = max(self.time, now + LATENCIES["short"])


def cycles(instructions: Sequence[Instruction], warps: int = 1, latency: int = LATENCIES["memory"]) -> list[float]:
    """Follow warps of a sub-core that begin at cycle 0; returns the cycle at which each is done."""
    running, free = [_Warp() for _ in range(warps)], {"issue": 0.0}
    while waiting := [warp for warp in running if warp.at < len(instructions)]:
        best, now = waiting[0], float("inf")
        for warp in waiting:
            one = instructions[warp.at]
            unit = "issue" if one.name == "HGMMA" else one.unit[0]  # it waits in a queue
            start = max(warp.ready(one), free["issue"], free.get(unit, 0.0))
            if start < now:
                best, now = warp, start
        one = instructions[best.at]
        unit, busy = one.unit
        free["issue"], free[unit] = now + 1, max(now, free.get(unit, 0.0)) + busy
        best.issue(one, now, free[unit], latency)
    return [max(warp.time, warp.products) for warp in running]


def interval(body: Sequence[Instruction], warps: int) -> float:
    """Count the cycles from one iteration of a loop to the next, with `warps` warps of a sub-core in it."""
    early, late = (max(cycles(list(body) * count, warps)) for count in (WARM_UP, ITERATIONS))
    return (late - early) / (ITERATIONS - WARM_UP)


def busy(body: Sequence[Instruction]) -> dict[str, float]:
    """Add up the cycles that a warp needs of each unit of a sub-core: "issue" and those of `UNITS`, and "tensor"."""
    total: dict[str, float] = {"issue": len(body)}
    for one in body:
        unit, cost = one.unit
        total[unit] = total.get(unit, 0.0) + cost
    return total

"""What the compiler makes of the kernels, without a GPU: `python -m kvq_kernels.static --targets sm_90 [NAME ...]`.

Compiles the launches that the operations ship (see `shipped`) ahead of time and reads the machine code: registers,
spills, shared memory, and of the main loop the instructions per cached number and the integer-to-float conversions.
Prints a table, or one JSON document with --json. What was read is kept under ~/.cache/kvq/static, by the source, so
that only what has changed is compiled again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from kvq_kernels import machine_code
from kvq_kernels.aot_cases import Launch, launches, operations
from kvq_kernels.tuning import trying

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_89": GPUTarget("cuda", 89, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
#: Bytes of shared memory that one program may have.
SHARED = {"sm_80": 166912, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
#: Instructions per cached number of the main loop that sm_90 must not go beyond, by kind of launch.
LIMITS = {"dense": 3.0, "uniform": 4.5, "codebook": 6.0}
LIMITED = "sm_90"


@dataclass(frozen=True)
class Report:
    """One launch on one target. registers per thread, spilled bytes per thread, shared bytes per program.

    per_number: instructions of the main loop per cached number and thread; 0 where the launch reads none. i2f:
    conversions from integers in that loop. bits: read per number. error: the compiler's, and nothing else is known.
    """

    operation: str
    name: str
    target: str
    kind: str
    registers: int = 0
    spills: int = 0
    shared: int = 0
    per_number: float = 0.0
    i2f: int = 0
    bits: float = 0.0
    opcodes: dict[str, int] | None = None
    error: str | None = None

    def faults(self) -> list[str]:
        """What must not be, in words."""
        if self.error is not None:
            return [f"does not compile: {self.error}"]
        found = []
        if self.spills:
            found.append(f"{self.spills} bytes per thread spill")
        if self.shared > SHARED[self.target]:
            found.append(f"{self.shared} bytes of shared memory, {SHARED[self.target]} at most")
        if self.i2f and self.kind in ("uniform", "codebook"):
            found.append(f"{self.i2f} integer-to-float conversions in the loop")
        limit = LIMITS.get(self.kind)
        if self.target == LIMITED and limit is not None:
            if self.per_number == 0:
                found.append("its main loop was not found")
            elif self.per_number > limit:
                found.append(f"{self.per_number} instructions per number, {limit} at most")
        return found


def reports(
    chosen: Sequence[tuple[str, str, str]], workers: int | None = None, trial: dict[str, int] | None = None
) -> Iterator[Report]:
    """A report of each (operation, name, target), in the order in which they are ready.

    Compiles in `workers` processes (as many as there are cores), none of which interprets kernels. trial: numbers that
    stand instead of the tables'. OSError where there is no disassembler.
    """
    machine_code.check_tools()
    shipped = {(operation, target): launches(operation, target) for operation, _, target in chosen}
    # What takes longest begins first, or all else would wait for it in the end.
    chosen = sorted(chosen, key=lambda one: not shipped[one[0], one[2]][one[1]].slow)
    with _compiled(), ProcessPoolExecutor(workers or os.cpu_count(), get_context("spawn")) as pool:
        for future in as_completed([pool.submit(report, *one, trial) for one in chosen]):
            yield future.result()


def everything(targets: Sequence[str] = tuple(TARGETS)) -> list[tuple[str, str, str]]:
    """(operation, name, target) of all that is shipped."""
    return [
        (operation, name, target)
        for operation in operations()
        for target in targets
        for name in launches(operation, target)
    ]


def extremes(target: str) -> list[tuple[str, str, str]]:
    """(operation, name, target) of every kernel with every configuration; of the formats that it reads so, those with
    the fewest and the most bits per number, but none that is slow to compile. For targets on which all formats would
    take too long."""
    found: dict[tuple, list[tuple[float, str]]] = {}
    for operation in operations():
        for name, one in launches(operation, target).items():
            if one.slow:
                continue
            alike = operation, one.kernel.__name__, one.kind, *one.options.items(), one.numbers
            found.setdefault(alike, []).append((one.bits, name))
    return sorted({(alike[0], end[1], target) for alike, own in found.items() for end in (min(own), max(own))})


@contextmanager
def _compiled() -> Iterator[None]:
    """Processes started inside compile kernels, whatever this one does."""
    before = os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def report(operation: str, name: str, target: str, trial: dict[str, int] | None = None) -> Report:
    """What was read before of the same source by the same compiler, or is now."""
    with trying(operation, trial or {}):
        launch = launches(operation, target)[name]
    source = describe(launch, TARGETS[target])
    path = _kept(source, target, launch)
    if path.exists():
        return replace(Report(**json.loads(path.read_text())), operation=operation, name=name)
    found = read(operation, name, target, launch, source)
    if found.error is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(found)))
        part.replace(path)
    return found


def read(operation: str, name: str, target: str, launch: Launch, source: ASTSource) -> Report:
    """Compile and read one launch."""
    one = Report(operation, name, target, launch.kind, bits=round(launch.bits, 3))
    try:
        compiled = triton.compile(source, target=TARGETS[target], options=launch.options)
    except Exception as error:  # of whichever pass of the compiler
        return replace(one, error=f"{type(error).__name__}: {error}".splitlines()[0])
    found = machine_code.read(compiled.asm)
    lanes = TARGETS[target].warp_size * launch.options["num_warps"]
    loop = machine_code.main_loop(found.code, launch.turns) if launch.numbers else None
    if loop is None:
        opcodes, per_number = {}, 0.0
    else:
        opcodes, per_number = loop, round(sum(loop.values()) * lanes / launch.numbers, 2)
    return replace(
        one,
        registers=found.registers,
        spills=found.spills,
        shared=compiled.metadata.shared,
        per_number=per_number,
        i2f=sum(count for op, count in opcodes.items() if machine_code.converts(op)),
        opcodes=opcodes,
    )


def describe(launch: Launch, target: GPUTarget) -> ASTSource:
    """The launch as the compiler takes it, by that part of Triton that a launch on a device goes through, too: what
    arguments are bound to, their types, and of which a multiple of 16 is known."""
    kernel, backend = launch.kernel, make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {"debug": False, **launch.constants, **launch.options}
    bound, specialization, options = bind(*launch.arguments, **given)
    _, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, options)
    return ASTSource(kernel, signature, constants, attributes)


def _kept(source: ASTSource, target: str, launch: Launch) -> Path:
    """Where the report of a source is kept."""
    own = launch.options, launch.kind, launch.numbers, launch.bits, launch.turns
    asked = (source.hash(), _reader(), triton.__version__, target, *own)
    state = hashlib.sha256(repr(asked).encode()).hexdigest()[:32]
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "kvq" / "static" / f"{state}.json"


@cache
def _reader() -> str:
    """Of the code that reads: another reading is another report."""
    return hashlib.sha256(b"".join(Path(p).read_bytes() for p in (__file__, machine_code.__file__))).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of operations or launches; none: all that are shipped")
    parser.add_argument("--targets", default=",".join(TARGETS), help="joined by commas (default: all)")
    parser.add_argument("--jobs", type=int, default=None, help="processes (default: one per core)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--opcodes", action="store_true", help="what the main loop is made of")
    parser.add_argument("--try", dest="trial", default="", help="instead of the tables', as tokens=64,warps=2")
    options = parser.parse_args()
    chosen = [
        one for one in everything(options.targets.split(",")) if not options.names or set(one[:2]) & set(options.names)
    ]
    trial = {key: int(value) for key, value in (pair.split("=") for pair in options.trial.split(",") if pair)}
    found = []
    for one in reports(chosen, options.jobs, trial):
        found.append(one)
        if not options.json:
            print(f"{one.operation}/{one.name} {one.target}: {one.registers} registers, {one.spills} spilled,", end=" ")
            print(f"{one.shared} shared, {one.per_number} per number, {one.i2f} I2F", *one.faults(), flush=True)
            if options.opcodes and one.opcodes:
                print("   ", " ".join(f"{op}:{count}" for op, count in one.opcodes.items()))
    if options.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    return 1 if any(one.faults() for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())

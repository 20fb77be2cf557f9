"""Static report of compiled kernels, without a GPU: `python -m kvq_kernels.static --targets sm_90 [NAME ...]`.

Compiles the launches of `aot_cases` and reads their machine code (`machine_code`): registers, spills, shared memory,
and of the main loop the instructions per cached number and the integer-to-float conversions. Prints a table, or one
JSON document with --json. Reports are cached in ~/.cache/kvq/static by the kernel's source.
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
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeAlias

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
#: Limit of shared memory per program, in bytes.
SHARED = {"sm_80": 166912, "sm_89": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
#: Columns of sm_100's tensor memory: a launch that needs more compiles to a trap.
TENSOR_MEMORY = 512
#: Limit of main-loop instructions per cached number on LIMITED_TARGET, by kind of launch. A transform of 64 channels
#: has the softmax of 128 for half the numbers: 5.7, 6.3 with the oldest Triton.
LIMITS = {"dense": 3.0, "uniform": 4.5, "codebook": 6.0, "transform": 6.5}
LIMITED_TARGET = "sm_90"

#: (operation, name, target) of a launch.
Key: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True)
class Report:
    """Resources of one launch on one target: registers and spilled bytes per thread, shared memory per program.

    tensor_memory: columns that a program has. per_number: instructions of the main loop per cached number and thread; 0
    where it reads none. i2f: integer-to-float conversions in that loop. narrow_stores: stores of 16 bits or less to
    shared memory there, which a lost layout of an operand shows in. bits: read per number. allowed_spills,
    expected_products: `Launch.spills`, `warpgroup_products`. error: the compiler's message; all fields of the code are
    then empty.
    """

    operation: str
    name: str
    target: str
    kind: str
    registers: int = 0
    spills: int = 0
    shared: int = 0
    tensor_memory: int = 0
    per_number: float = 0.0
    i2f: int = 0
    narrow_stores: int = 0
    allowed_spills: int = 0
    expected_products: int | None = None
    bits: float = 0.0
    opcodes: dict[str, int] | None = None
    error: str | None = None

    def faults(self) -> list[str]:
        """Messages for everything that exceeds a limit."""
        if self.error is not None:
            return [f"does not compile: {self.error}"]
        faults = []
        if self.spills > self.allowed_spills:
            faults.append(f"{self.spills} bytes per thread spill")
        if self.shared > SHARED[self.target]:
            faults.append(f"{self.shared} bytes of shared memory, {SHARED[self.target]} at most")
        if self.tensor_memory > TENSOR_MEMORY:
            faults.append(f"{self.tensor_memory} columns of tensor memory, {TENSOR_MEMORY} at most")
        if self.i2f and self.kind in ("uniform", "codebook", "transform"):
            faults.append(f"{self.i2f} integer-to-float conversions in the loop")
        if self.kind == "transform" and self.target == LIMITED_TARGET:
            faults += self._transform_faults()
        limit = LIMITS.get(self.kind)
        if self.target == LIMITED_TARGET and limit is not None:
            if self.per_number == 0:
                faults.append("its main loop was not found")
            elif self.per_number > limit:
                faults.append(f"{self.per_number} instructions per number, {limit} at most")
        return faults

    def _transform_faults(self) -> list[str]:
        """Messages for operands that do not stay in registers."""
        faults, products = [], (self.opcodes or {}).get("HGMMA", 0)
        if self.narrow_stores:
            faults.append(f"{self.narrow_stores} narrow stores to shared memory in the loop")
        if self.expected_products not in (None, products):
            faults.append(f"{products} products of a warp group in the loop, not {self.expected_products}")
        return faults


def reports(
    selected: Sequence[Key], workers: int | None = None, trial: dict[str, int] | None = None
) -> Iterator[Report]:
    """Yield the report of each selected launch as soon as it is ready.

    Compiles in `workers` processes (default: one per core), also where this process interprets kernels. trial: values
    that replace the tuned ones. OSError without a disassembler.
    """
    machine_code.check_tools()
    cases = {(operation, target): launches(operation, target) for operation, _, target in selected}
    slow_first = sorted(selected, key=lambda key: not cases[key[0], key[2]][key[1]].slow)
    with _without_interpreter(), ProcessPoolExecutor(workers or os.cpu_count(), get_context("spawn")) as pool:
        for future in as_completed([pool.submit(report, *key, trial) for key in slow_first]):
            yield future.result()


def all_launches(targets: Sequence[str] = tuple(TARGETS)) -> list[Key]:
    """Keys of all launches on the targets."""
    return [
        (operation, name, target)
        for operation in operations()
        for target in targets
        for name in launches(operation, target)
    ]


def widest_formats(target: str) -> list[Key]:
    """Keys of every kernel in every configuration, of the format with the most bits per number.

    Without launches that are slow to compile: for targets on which all formats would take too long.
    """
    same_kernel: dict[tuple[Any, ...], list[tuple[float, str]]] = {}
    for operation in operations():
        for name, launch in launches(operation, target).items():
            if not launch.slow:
                several = launch.constants.get("QUERIES", 1) > 1
                key = operation, launch.kernel.__name__, launch.kind, *launch.options.items(), launch.numbers, several
                same_kernel.setdefault(key, []).append((launch.bits, name))
    return sorted((key[0], max(formats)[1], target) for key, formats in same_kernel.items())


@contextmanager
def _without_interpreter() -> Iterator[None]:
    """Inside the block, new processes compile kernels, even if this one interprets them."""
    before = os.environ.pop("TRITON_INTERPRET", None)
    try:
        yield
    finally:
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


def report(operation: str, name: str, target: str, trial: dict[str, int] | None = None) -> Report:
    """Report of one launch, cached by its source and the compiler."""
    with trying(operation, trial or {}):
        launch = launches(operation, target)[name]
    source = describe(launch, TARGETS[target])
    path = _cache_path(source, target, launch)
    if path.exists():
        return replace(Report(**json.loads(path.read_text())), operation=operation, name=name)
    new = read(operation, name, target, launch, source)
    if new.error is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(new)))
        part.replace(path)
    return new


def read(operation: str, name: str, target: str, launch: Launch, source: ASTSource) -> Report:
    """Report of one launch, compiled now."""
    empty = Report(
        operation,
        name,
        target,
        launch.kind,
        allowed_spills=launch.spills,
        expected_products=launch.warpgroup_products,
        bits=round(launch.bits, 3),
    )
    try:
        compiled = triton.compile(source, target=TARGETS[target], options=launch.options)
    except Exception as error:  # of any pass of the compiler
        return replace(empty, error=f"{type(error).__name__}: {error}".splitlines()[0])
    code = machine_code.read(compiled.asm)
    lanes = TARGETS[target].warp_size * launch.options["num_warps"]
    loop = machine_code.main_loop(code.lines, launch.inner_iterations) if launch.numbers else None
    opcodes = loop or {}
    return replace(
        empty,
        registers=code.registers,
        spills=code.spills,
        shared=compiled.metadata.shared,
        tensor_memory=getattr(compiled.metadata, "tmem_size", 0),
        per_number=round(sum(opcodes.values()) * lanes / launch.numbers, 2) if opcodes else 0.0,
        i2f=sum(count for op, count in opcodes.items() if machine_code.converts(op)),
        narrow_stores=sum(count for op, count in opcodes.items() if op in machine_code.NARROW_STORES),
        opcodes=opcodes,
    )


def describe(launch: Launch, target: GPUTarget) -> ASTSource:
    """Source of a launch for Triton's compiler: signature, constants and which arguments are multiples of 16.

    Made by the same part of Triton as for a launch on a device.
    """
    kernel, backend = launch.kernel, make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {"debug": False, **launch.constants, **launch.options}
    bound, specialization, options = bind(*launch.arguments, **given)
    _, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, options)
    return ASTSource(kernel, signature, constants, attributes)


def _cache_path(source: ASTSource, target: str, launch: Launch) -> Path:
    """Path of a cached report: depends on everything that it is computed from."""
    inputs = "kernel", "arguments", "constants"
    about = [getattr(launch, field.name) for field in fields(launch) if field.name not in inputs]
    state = repr((source.hash(), _reader_hash(), triton.__version__, target, *about))
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "kvq" / "static" / f"{hashlib.sha256(state.encode()).hexdigest()[:32]}.json"


@cache
def _reader_hash() -> str:
    """Hash of the source code that reads machine code."""
    return hashlib.sha256(b"".join(Path(p).read_bytes() for p in (__file__, machine_code.__file__))).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="of operations or launches (default: all)")
    parser.add_argument("--targets", default=",".join(TARGETS), help="joined by commas (default: all)")
    parser.add_argument("--jobs", type=int, default=None, help="processes (default: one per core)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--opcodes", action="store_true", help="print how often each opcode is in the main loop")
    parser.add_argument("--try", dest="trial", default="", help="replace tuned values, as tokens=64,warps=2")
    options = parser.parse_args()
    keys = all_launches(options.targets.split(","))
    if options.names:
        keys = [key for key in keys if set(key[:2]) & set(options.names)]
    trial = {key: int(value) for key, value in (pair.split("=") for pair in options.trial.split(",") if pair)}
    done = []
    for one in reports(keys, options.jobs, trial):
        done.append(one)
        if not options.json:
            print(f"{one.operation}/{one.name} {one.target}: {one.registers} registers, {one.spills} spilled,", end=" ")
            print(f"{one.shared} shared, {one.per_number} per number, {one.i2f} I2F", *one.faults(), flush=True)
            if options.opcodes and one.opcodes:
                print("   ", " ".join(f"{op}:{count}" for op, count in one.opcodes.items()))
    if options.json:
        print(json.dumps([asdict(one) for one in done], indent=1))
    return 1 if any(one.faults() for one in done) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compile launches of decode attention at Llama-3.1-8B's shape, and divide a decode step among their programs."""

from __future__ import annotations

import argparse
import dataclasses
import math
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import chain
from typing import Any

import triton
from kvq_kernels import fields, static
from kvq_kernels.aot_cases import Launch
from kvq_kernels.decode_attention import aot_cases as decode_cases
from kvq_kernels.decode_attention.arguments import side_spec
from kvq_kernels.decode_attention.configs import choose_splits, choose_tile
from kvq_kernels.decode_attention.kernel import EXACT_COST, MIXED_COST
from kvq_kernels.decode_attention.launch import TAIL_TILE
from kvq_kernels.decode_attention.rope import padded_dim
from kvq_kernels.transform_attention import aot_cases as transform_cases
from kvq_kernels.transform_attention import configs as transform_configs
from kvq_kernels.transform_attention.arguments import EXACT_TILE
from kvq_kernels.transform_attention.kernel import OUTPUT_CHANNELS
from kvq_kernels.transform_attention.launch import MAX_EXACT_PROGRAMS

from kvq_cli.benchmarking.kernels import decode, transform
from kvq_cli.calibration.allocation import MENU_OF_LAYER
from kvq_cli.methods.transform_specs import even_widths
from lab.studies import warp_timing
from lab.studies.warp_timing import LATENCIES, Code, Instruction

TARGET, HEADS, DIM = "sm_90", decode_cases.HEADS, decode_cases.DIM
#: Multiprocessors of an H100 or H200 (data sheets); registers, bytes of shared memory and programs of one of them, and
#: bytes that the system adds to a program's (CUDA C++ Programming Guide, compute capability 9.0).
MULTIPROCESSORS, REGISTERS, SHARED, MAX_PROGRAMS, RESERVED = 132, 65536, 233472, 32, 1024
#: Bits by which a key's fields fall from one to the next, about as in the shipped profile of 2 bits.
KEY_SLOPE = 0.25


@dataclass(frozen=True, eq=False)
class Kernel:
    """A compiled launch.

    bits: of a packed number. tokens: of a tile. waves: programs of a multiprocessor that splits are planned for.
    windows: sinks, recent tokens, room for both. lists: of heads with the same profiles, a launch each. Instructions:
    of the main `loop` over packed tokens, of its `edges` before and after it, of a tile of `exact` tokens, of a tile of
    `mixed` ones (packed in part of a tile; none: they are read as exact ones).
    """

    name: str
    operation: str
    bits: float
    warps: int
    tokens: int
    registers: int
    shared: int
    waves: int
    windows: tuple[int, int, int]
    loop: tuple[Instruction, ...]
    edges: tuple[Instruction, ...]
    exact: tuple[Instruction, ...]
    mixed: tuple[Instruction, ...] = ()
    exact_tile: int = TAIL_TILE
    lists: int = 1

    def pairs(self, batch: int) -> int:
        """Count the pairs of row and head of a launch."""
        return math.ceil(batch * HEADS / self.lists)

    @property
    def occupancy(self) -> int:
        """Programs that a multiprocessor holds."""
        by_registers = REGISTERS // (32 * self.warps * 8 * math.ceil(self.registers / 8))
        return min(by_registers, SHARED // (self.shared + RESERVED), MAX_PROGRAMS)

    @lru_cache  # noqa: B019 - there are few of them
    def intervals(self, warps: int) -> tuple[float, float]:
        """Bound the cycles from a tile to the next, (least, most), with so many warps of a sub-core; all do a tile in
        this time."""
        most, busiest = warp_timing.interval(self.loop, warps), max(warp_timing.busy(self.loop).values())
        return min(most, max(warp_timing.interval(self.loop, 1), warps * busiest)), most

    @lru_cache  # noqa: B019
    def edge_cycles(self, warps: int) -> float:
        """Count the cycles of a program before and after its tiles."""
        return max(warp_timing.cycles(self.edges, warps, LATENCIES["level 2"]))

    @lru_cache  # noqa: B019
    def tail_cycles(self, plan: Plan) -> float:
        """Count the cycles of the longest program for exact tokens, or for mixed ones."""
        exact, mixed = (max(warp_timing.cycles(tile)) if tile else 0.0 for tile in (self.exact, self.mixed))
        return max(plan.exact_tiles * exact, plan.mixed_tiles * mixed)


def _next_field(widths: list[int], slope: float) -> int:
    return min(range(len(widths)), key=lambda field: widths[field] + slope * field)


def key_profile(rate: int) -> tuple[int, ...]:
    """Fill lanes of `rate` bytes with widths that fall by `KEY_SLOPE` bits a field, or by more where these do not fit
    the lanes' words. ValueError where none do."""
    for steeper in range(20):
        widths = [0] * (DIM // fields.FIELD)
        for _ in range(4 * rate):
            widths[_next_field(widths, KEY_SLOPE + 0.05 * steeper)] += 1
        kept = tuple(width for width in widths if width)
        if fields.fits(kept):
            return kept
    raise ValueError(f"no profile fills lanes of {rate} bytes")


def stores() -> list[str]:
    """List the stores of `kvq bench kernels` that `compiled` knows."""
    return [*decode_cases.storage_cases(), *transform.STORES]


def launch_of(text: str) -> str:
    """Check the name of a launch."""
    name, lists = _divided(text)
    if (name not in stores() and not re.fullmatch(r"klt-\d+-\d+", name)) or not 1 <= lists <= MENU_OF_LAYER:
        known = f"klt-K-V (bytes of a lane) or one of {', '.join(stores())}"
        raise argparse.ArgumentTypeError(
            f"{text!r}: give {known}; klt's may end in -x2 to -x{MENU_OF_LAYER} (lists of heads)"
        )
    return text


def _divided(name: str) -> tuple[str, int]:
    """Divide the name of a launch: (store, lists of heads)."""
    store, _, lists = name.rpartition("-x")
    return (store, int(lists)) if store.startswith("klt") and lists.isdecimal() else (name, 1)


def trial_of(text: str) -> dict[str, int]:
    """Parse values of klt's tuning: `half_sums=1,programs=3`."""
    names = [field.name for field in dataclasses.fields(transform_configs.Config)]
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if not all(name in names and value.isdecimal() for name, _, value in pairs):
        raise argparse.ArgumentTypeError(f"{text!r}: give NAME=N, separated by commas; names: {', '.join(names)}")
    return {name: int(value) for name, _, value in pairs}


def compiled(name: str) -> Kernel:
    """Compile one of `stores`, or `klt-K-V`: klt with K bytes for a lane of keys, V of values; `-x3`: 3 lists."""
    if name.startswith("klt"):
        store, lists = _divided(name)
        shape = transform.STORES.get(store)
        if shape is None:
            keys, values = map(int, store.split("-")[1:])
            shape = transform_cases.Shape(key_profile(keys), even_widths(values, DIM))
        windows = transform.SINKS, transform.RECENT, transform.SINKS + transform.RING
        waves = transform_configs.Config.of(TARGET, DIM).programs
        launch = dataclasses.replace(shape, listed=lists > 1).launch(TARGET)
        return dataclasses.replace(_read(name, "transform_attention", launch, waves, windows), lists=lists)
    sides = decode_cases.storage_cases()[name][:2]
    waves = choose_tile(TARGET, *(side_spec(side, DIM) for side in sides)).waves
    sinks, ring = (x.shape[2] for x in (sides[0].sinks, sides[0].ring) if x is not None)
    launch = decode_cases.launches(TARGET)[name]
    return _read(name, "decode_attention", launch, waves, (sinks, decode.RECENT, sinks + ring))


def machine_code_of(launch: Launch) -> tuple[Code, int, int]:
    """Compile a launch, or read it from Triton's cache: (code, registers, bytes of shared memory)."""
    target = static.TARGETS[TARGET]
    result = triton.compile(static.describe(launch, target), target=target, options=dict(launch.options))
    usage = static.machine_code.read(result.asm)
    return warp_timing.read(result.asm["cubin"]), usage.registers, result.metadata.shared


def _read(name: str, operation: str, launch: Launch, waves: int, windows: tuple[int, int, int]) -> Kernel:
    code, registers, shared = machine_code_of(launch)
    regions, fixed = code.regions(), launch.constants
    tokens = fixed["K"].N if operation == "decode_attention" else fixed["N"]
    first, last = regions[0]
    loops = sorted(loop for loop in code.loops if loop[1] > loop[0])
    products = [loop for loop in loops if loop[1] <= last and any(_of_packed(one) for one in code.body(loop))]
    main = min(products, key=lambda loop: loop[1] - loop[0])
    exact = next(loop for loop in loops if loop[0] >= regions[1][0])
    edges = (
        code.trace(first, main[0] - 1, lambda _: 1),
        code.trace(main[1] + 1, last, lambda _: DIM // OUTPUT_CHANNELS.value),
    )
    mixed: tuple[Instruction, ...] = ()
    if operation == "decode_attention" and not fixed["PACKED_EXACT"]:
        mixed = _mixed(code, next(loop for loop in loops if loop[0] >= regions[2][0]), fixed)
    return Kernel(
        name, operation, launch.bits, launch.options["num_warps"], tokens, registers, shared, waves, windows,
        tuple(code.body(main)), tuple(chain(*edges)), tuple(code.trace(*exact, lambda _: 1)), mixed,
        fixed["EXACT_TILE"],
    )  # fmt: skip


def _mixed(code: Code, tile: tuple[int, int], fixed: dict[str, Any]) -> tuple[Instruction, ...]:
    """Instructions of a tile of mixed tokens; its inner loops are over column tiles of the keys, then of the values."""
    inner = sorted(loop for loop in code.loops if tile[0] < loop[0] < loop[1] < tile[1])
    keys = fixed["K"]
    columns = padded_dim(DIM) // keys.E
    trips = dict(zip(inner, (columns if keys.STYLE == "none" else columns // 2, columns), strict=False))
    return tuple(code.trace(*tile, lambda loop: trips.get(loop, 1)))


def _of_packed(one: Instruction) -> bool:
    """Whether it is a product of packed numbers; those of exact tokens and of values' sums are bfloat16 or TF32."""
    return one.unit[0] == "tensor" and not any(kind in one.opcode for kind in ("BF16", "TF32"))


@cache
def combination(results: int) -> float:
    """Count the cycles of `combine_kernel` for so many results of each query head."""
    launch = decode_cases.launches(TARGET)["combine-1024"]
    code, _, _ = machine_code_of(launch)
    rounds = math.ceil(results / launch.constants["S"])
    trace = list(code.trace(*code.regions()[0], lambda _: rounds))
    return max(warp_timing.cycles(trace, 1, LATENCIES["level 2"]))


@dataclass(frozen=True)
class Plan:
    """Division of a row and head: packed tokens in whole tiles, exact tokens, mixed ones; for each of these the number
    of programs, and tiles of a program."""

    packed: int
    exact: int
    mixed: int
    splits: int
    tiles: int
    exact_programs: int
    exact_tiles: int
    mixed_programs: int = 0
    mixed_tiles: int = 0

    @property
    def programs(self) -> int:
        return self.splits + self.exact_programs + self.mixed_programs

    @classmethod
    def of(cls, kernel: Kernel, batch: int, context: int) -> Plan:
        """Plan as the operation's launch does."""
        sinks, recent, room = kernel.windows
        if kernel.operation == "transform_attention":
            packed = (context - sinks - recent) // fields.BLOCK * fields.BLOCK
            tiles, exact = math.ceil(packed / kernel.tokens), context - packed
            exact_programs = min(MAX_EXACT_PROGRAMS, math.ceil(room / EXACT_TILE))
            slots = MULTIPROCESSORS * kernel.waves
            splits = transform_configs.choose_splits(kernel.pairs(batch), tiles, exact_programs, slots)
            exact_tiles = math.ceil(math.ceil(exact / EXACT_TILE) / exact_programs)
            return cls(packed, exact, 0, splits, math.ceil(tiles / splits), exact_programs, exact_tiles)
        tiles = (context - sinks - recent) // kernel.tokens
        others = context - tiles * kernel.tokens
        exact = sinks + recent if kernel.mixed else others
        planned = math.ceil((context + EXACT_COST.value * room) / kernel.tokens)
        programs = max(3, choose_splits(batch * HEADS, planned, MULTIPROCESSORS, kernel.waves))
        times = _tiles(exact, kernel.exact_tile, EXACT_COST.value), _tiles(others - exact, TAIL_TILE, MIXED_COST.value)
        whole = sum(time for _, time in times) + tiles * kernel.tokens
        mixed_programs, mixed_tiles = _programs(*times[1], programs, whole, programs - 2)
        exact_programs, exact_tiles = _programs(*times[0], programs, whole, programs - 1 - mixed_programs)
        splits = programs - exact_programs - mixed_programs
        return cls(
            tiles * kernel.tokens, exact, others - exact, splits, math.ceil(tiles / splits), exact_programs,
            exact_tiles, mixed_programs, mixed_tiles,
        )  # fmt: skip


def _tiles(tokens: int, tile: int, cost: int) -> tuple[int, int]:
    """Tiles of so many tokens, and their time in tokens of whole tiles."""
    return math.ceil(tokens / tile), math.ceil(tokens / tile) * tile * cost


def _programs(tiles: int, time: int, programs: int, whole: int, limit: int) -> tuple[int, int]:
    """(programs, tiles of each) as `divide_programs` gives them to a part that takes `time` of `whole`."""
    if tiles == 0:
        return 0, 0
    each = math.ceil(tiles / min(math.ceil(programs * time / whole), limit, tiles))
    return math.ceil(tiles / each), each

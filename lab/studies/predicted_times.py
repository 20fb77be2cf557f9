"""Predict the time of a decode step's attention on an H100 and an H200, from compiled launches, without a GPU.

python -m lab.studies.predicted_times [--gpu h100 h200] [--shapes 1x131072 8x131072] [--try half_sums=1] [--json]

Compiles shipped launches for sm_90: klt's (`transform_attention`), KIVI's and those of 16 bits (`decode_attention`).
Predicts one layer of Llama-3.1-8B's shape (32 query heads, 8 kv heads, head_dim 128), with the windows of `kvq bench
kernels`:

    time   = launches + combination + max(lists x max(rounds (start and end + tiles x interval), tail), bytes / rate)
    rounds = programs / (multiprocessors x programs that one holds, by registers and shared memory), rounded up
    tiles  = tiles of a row and head / splits, rounded up, with as many splits as the launch plans

- lists: of heads that have the same profiles; they are launched one after another.
- interval: cycles of a program from a tile to the next, while the multiprocessor is full. At most as `warp_timing`
  follows all of its warps through the machine code; at least as long as one program alone takes, or the busiest unit.
- tail: exact tokens (sinks and recent ones) and those in part of a tile, in programs of their own; if there is no room
  beside the others, these run after them.
- rate: of a copy. ends: start and end of programs, launches and combination.
- memory, issue, tensor: the least time that bytes, issue slots and tensor cores of the whole GPU allow.

Measured times are those in benchmarks/*/kernels.json; * marks those of other versions of the kernels.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

from kvq_kernels.tuning import trying

from kvq_cli.benchmarking.gpus import GPUS
from kvq_cli.benchmarking.kernels.lower_bounds import COPY_EFFICIENCY
from kvq_cli.benchmarking.machine import kernels_digest
from kvq_cli.evaluation.formats import markdown
from lab.studies import warp_timing
from lab.studies.compiled_attention import (
    DIM,
    HEADS,
    MULTIPROCESSORS,
    Kernel,
    Plan,
    combination,
    compiled,
    launch_of,
    trial_of,
)

#: GPU -> its data sheet in `gpus`.
DATA_SHEETS = {"h100": "h100-sxm", "h200": "h200"}
#: Clock of both under load, as nvidia-smi reports it (`machine_after` in benchmarks/).
HERTZ, SUB_CORES = 1.98e9, 4
#: Microseconds from the end of one kernel of a CUDA graph to the start of the next: assumed.
LAUNCH = 1.5
SHAPES = ((1, 32768), (1, 131072), (8, 131072))
FEWEST = 512  # tokens of a context: its windows, and some tiles
LAUNCHES = ("fp16", "kivi-2bit-g32", "klt-2bit", "klt-2bit-x3", "klt-9-8", "klt-12-11")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
#: Goals of klt: (batch, context) -> microseconds on an H100; on an H200, times as fast as 16 bits.
GOALS = {(1, 131072): (46.0, 74.0), (8, 131072): (307.0, 530.0)}
H200_GOAL = (1.5, 3.4)

#: (store, batch, context) -> (microseconds, whether the kernels are the same now).
Measured: TypeAlias = dict[tuple[str, int, int], tuple[float, bool]]


@dataclass(frozen=True)
class Prediction:
    """Microseconds: the terms of the module's docstring. loop: tiles x interval. loop, time: (least, most)."""

    gpu: str
    kernel: str
    bits: float
    batch: int
    context: int
    splits: int
    tiles: int
    memory: float
    issue: float
    tensor: float
    loop: tuple[float, float]
    tail: float
    ends: float
    time: tuple[float, float]
    measured: float | None = None
    current: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        return self.batch, self.context

    @property
    def error(self) -> float | None:
        """Relative error of the most that is predicted."""
        return None if self.measured is None else self.time[1] / self.measured - 1


def predict(kernel: Kernel, gpu: str, batch: int, context: int) -> Prediction:
    """Predict the time of one layer's decode step; `batch` rows of `context` tokens."""
    plan, pairs, micro = Plan.of(kernel, batch, context), kernel.pairs(batch), 1e6 / HERTZ
    slots, programs = MULTIPROCESSORS * kernel.occupancy, pairs * plan.splits
    rounds, resident = math.ceil(programs / slots), min(kernel.occupancy, math.ceil(programs / MULTIPROCESSORS))
    warps = math.ceil(resident * kernel.warps / SUB_CORES)
    edges = rounds * kernel.edge_cycles(warps) * micro
    least, most = (rounds * plan.tiles * interval * micro for interval in kernel.intervals(warps))
    tail = kernel.tail_cycles(plan) * micro
    turns = max(1, int((edges + least) / rounds // tail))  # tails that a place has time for in a round
    late = pairs * (plan.programs - plan.splits) > turns * (rounds * slots - programs)
    nbytes = 2 * batch * HEADS * DIM * (plan.packed * kernel.bits / 8 + (plan.exact + plan.mixed) * 2)
    memory = 1e6 * nbytes / (COPY_EFFICIENCY * GPUS[DATA_SHEETS[gpu]].bandwidth)
    units = warp_timing.busy(kernel.loop)
    lists = kernel.lists
    share = batch * HEADS * plan.packed / kernel.tokens * kernel.warps / SUB_CORES / MULTIPROCESSORS * micro
    between = (lists + 1) * LAUNCH + combination(plan.programs) * micro
    fastest, slowest = (
        between + max(lists * (edges + loop + tail * late), lists * tail, memory) for loop in (least, most)
    )
    return Prediction(
        gpu, kernel.name, kernel.bits, batch, context, plan.splits, plan.tiles, memory,
        share * units["issue"], share * units["tensor"], (lists * least, lists * most), lists * tail,
        lists * edges + between, (fastest, slowest),
    )  # fmt: skip


def measured_times(gpu: str) -> Measured:
    """Read the medians that `kvq bench kernels` measured on a GPU; without klt's kernel of version 0.3."""
    found: Measured = {}
    for path in sorted(BENCHMARKS.glob("*/kernels.json")):
        results = json.loads(path.read_text(encoding="utf-8"))
        current = results["machine"]["kernels"] == kernels_digest()
        for row in results["rows"] if gpu.upper() in results["machine"]["device"] else []:
            known = current or row["operation"] == "decode_attention"
            if known and "us" in row and "store" in row and "tail" not in row:
                found[row["store"], row["batch"], row["context"]] = row["us"]["p50"], current
    return found


def launch_table(kernels: Sequence[Kernel]) -> str:
    """Format the resources of launches, and cycles of a tile: issue slots of a warp, its use of a sub-core's units, and
    the interval between tiles of a program that is alone on a multiprocessor, and of as many as it holds."""
    columns = ["launch", "bits", "registers", "KB shared", "programs", "tokens of a tile"]
    rows = []
    for one in kernels:
        units, warps = warp_timing.busy(one.loop), math.ceil(one.occupancy * one.warps / SUB_CORES)
        cycles = [units["issue"], units["tensor"], units["alu"], one.intervals(1)[1], one.intervals(warps)[1]]
        sizes = [one.registers, round(one.shared / 1024), one.occupancy, one.tokens]
        rows.append([one.name, f"{one.bits:.3g}", *sizes, *(f"{count:.0f}" for count in cycles)])
    return markdown([*columns, "issue", "tensor", "ALU", "alone", "together"], rows)


def time_table(predictions: Sequence[Prediction]) -> str:
    """Format a row for each prediction; speeds are relative to fp16's prediction."""
    columns = ["shape", "launch", "predicted us", "times fp16", "memory", "issue", "tensor", "loop", "tail", "ends"]
    dense, rows = dense_times(predictions), []
    for one in predictions:
        terms = ((one.memory,), (one.issue,), (one.tensor,), one.loop, (one.tail,), (one.ends,))
        speed = [dense[one.shape] / time for time in reversed(one.time)]
        measured = "" if one.measured is None else f"{one.measured:.4g}{'' if one.current else '*'}"
        error = "" if one.error is None else f"{one.error:+.0%}"
        cells = [_range(one.time), _range(speed, 2), *map(_range, terms)]
        rows.append([_text(one.shape), one.kernel, *cells, measured, error])
    return markdown([*columns, "measured", "error"], rows)


def dense_times(predictions: Sequence[Prediction]) -> dict[tuple[int, int], float]:
    """Select what is predicted for fp16: (batch, context) -> microseconds."""
    return {one.shape: one.time[1] for one in predictions if one.kernel == "fp16"}


def _range(values: Sequence[float], digits: int = 0) -> str:
    return " to ".join(dict.fromkeys(f"{value:.{digits or (1 if value < 20 else 0)}f}" for value in values))


def _text(shape: tuple[int, int]) -> str:
    return f"{shape[0]} x {shape[1]:,}"


def errors(kernels: Sequence[Kernel], gpu: str, measured: Measured) -> Iterator[str]:
    """Compare the predictions of each launch with all times that were measured."""
    for kernel in kernels:
        shapes = [key[1:] for key in measured if key[0] == kernel.name]
        found = [predict(kernel, gpu, *shape).time[1] / measured[kernel.name, *shape][0] - 1 for shape in shapes]
        if found:
            spread = f"{min(found):+.0%} to {max(found):+.0%}, mean {fmean(found):+.0%}"
            yield f"{kernel.name}: error of the prediction in {len(found)} measured shapes {spread}"
    if not measured:
        yield "No measured times of this GPU."


def verdicts(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Compare predictions of klt with its goals, and name the longest term."""
    for one in predictions:
        if not one.kernel.startswith("klt") or one.shape not in GOALS:
            continue
        dense = dense_times(predictions)[one.shape]
        low, high = GOALS[one.shape] if one.gpu == "h100" else (dense / H200_GOAL[1], dense / H200_GOAL[0])
        over = [time / high - 1 for time in one.time]
        verdict = "met" if over[1] <= 0 else "not met" if over[0] > 0 else "perhaps met"
        terms = {"memory": one.memory, "loop": one.loop[1], "tail": one.tail, "ends": one.ends}
        longest = max(terms, key=lambda term: terms[term])
        goal = f"goal of {_range((low, high))} us {verdict}: {over[0]:+.0%} to {over[1]:+.0%} from its upper end"
        yield f"{one.kernel}, {_text(one.shape)}: {goal}; longest term: {longest}"


def shape_of(text: str) -> tuple[int, int]:
    """Parse (batch, context): `8x131072`."""
    batch, _, context = text.partition("x")
    if not (batch.isdecimal() and context.isdecimal() and int(batch) > 0 and int(context) > FEWEST):
        raise argparse.ArgumentTypeError(f"{text!r}: give BATCHxCONTEXT, a context above {FEWEST} tokens, as 8x131072")
    return int(batch), int(context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", nargs="+", choices=DATA_SHEETS, default=list(DATA_SHEETS))
    parser.add_argument("--shapes", nargs="+", type=shape_of, default=SHAPES, metavar="BATCHxCONTEXT")
    parser.add_argument(
        "--launches",
        nargs="+",
        type=launch_of,
        default=LAUNCHES,
        metavar="NAME",
        help="stores of `kvq bench kernels`, or klt-K-V: keys of K bytes a lane, values of V; -x3: heads in 3 lists",
    )
    parser.add_argument(
        "--try",
        dest="trial",
        type=trial_of,
        default={},
        metavar="NAME=N,...",
        help="replace values of klt's tuning, as half_sums=1,programs=3",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with trying("transform_attention", options.trial):
        kernels = [compiled(name) for name in dict.fromkeys(["fp16", *options.launches])]
    measured = {gpu: measured_times(gpu) for gpu in options.gpu}
    found: dict[str, list[Prediction]] = {gpu: [] for gpu in options.gpu}
    for gpu, (batch, context), kernel in ((g, s, k) for g in options.gpu for s in options.shapes for k in kernels):
        us, current = measured[gpu].get((kernel.name, batch, context), (None, False))
        found[gpu].append(replace(predict(kernel, gpu, batch, context), measured=us, current=current))
    if options.json:
        print(json.dumps([asdict(one) for gpu in options.gpu for one in found[gpu]], indent=1))
        return
    print(f"Launches; cycles of a tile\n\n{launch_table(kernels)}")
    for gpu, predictions in found.items():
        print(f"\n{gpu.upper()}\n\n{time_table(predictions)}\n")
        print(*errors(kernels, gpu, measured[gpu]), *verdicts(predictions), sep="\n")


if __name__ == "__main__":
    main()

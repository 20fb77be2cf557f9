"""`kvq bench kernels`: check and time the kernels on a GPU, or analyze their compiled code without one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvq_cli.cli import options as opt
from kvq_cli.cli.bench_shared import OutDir, bench_option, kernel_device, resumable_result, write_result
from kvq_cli.cli.output import Output
from kvq_cli.cli.rules import unless
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.files import check_writable

if TYPE_CHECKING:
    from kvq_kernels.static import Report

Static = Annotated[
    bool, bench_option("--static", help="Compile all shipped kernels and analyze their code; needs no GPU.")
]
Targets = Annotated[
    str | None,
    bench_option(
        "--target",
        metavar="NAMES",
        help="With --static: architectures, joined by commas (default: sm_80,sm_89,sm_90,sm_100,gfx942).",
    ),
]
Operations = Annotated[
    str | None,
    bench_option(
        "--operation",
        metavar="NAMES",
        help="Operations, separated by commas: decode_attention, quantized_matvec, quantize_pack, squat_quantize, "
        "assign_centroids, transform_attention, transform_pack (default: all); with --static also rematerialize.",
    ),
]
Seconds = Annotated[
    int | None, bench_option("--seconds", min=1, help="Start no further shape after this time; continue with --resume.")
]
Resume = Annotated[bool, bench_option("--resume", help="Keep the results in --out and measure the remaining shapes.")]
Check = Annotated[bool, bench_option("--check", help="Only check the kernels' results on this GPU, at small sizes.")]
Dry = Annotated[
    bool,
    bench_option(
        "--dry", help="Test run with tiny sizes, whose times are meaningless; without a GPU, in Triton's interpreter."
    ),
]
_run = unless(lambda values: not values["static"], "--static runs no kernel")
_timed = unless(lambda values: not (values["static"] or values["check"]), "nothing is timed")
_written = unless(lambda values: values["static"] or not values["check"], "--check writes nothing")


def kernels(
    operation: Operations = None,
    check: Annotated[Check, _run] = False,
    static: Static = False,
    target: Targets = None,
    seconds: Annotated[Seconds, _timed] = None,
    resume: Annotated[Resume, _timed] = False,
    dry: Annotated[Dry, _run] = False,
    out_dir: Annotated[OutDir, _written] = Path("results/bench"),
    device: Annotated[opt.Device, _run] = "auto",
    config: opt.Config = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Check the kernels on this GPU, then time them with a cold cache, next to the fastest 16-bit attention."""
    out = Output(as_json=as_json, quiet=quiet)
    names = None if operation is None else opt.names(operation, "--operation")
    if static:
        _static(out, names, target, out_dir)
        return
    if target is not None:
        raise UsageError("--target needs --static: otherwise kernels run on the installed GPU")
    place = kernel_device(device, dry)
    from kvq_cli.benchmarking.kernels import run
    from kvq_cli.benchmarking.kernels.catalog import select_experiments
    from kvq_cli.benchmarking.kernels.experiment import Sizes
    from kvq_cli.benchmarking.machine import machine

    experiments, sizes = select_experiments(names), Sizes(dry)
    if check:
        rows = list(run.check(experiments, sizes.to_check, place))
        columns = ["operation", "case", "error", "allowed", "failed"]
        out.table(columns, [[row.get(column) for column in columns] for row in rows])
        out.result({"bench": "kernels", "machine": machine(place), "checked": rows})
    else:
        check_writable(out_dir)
        document = _measure(out, experiments, sizes, place, seconds, out_dir, resume)
        rows = document["checked"]
        _print(out, document)
        out.note(f"written: {draw(document, out_dir, out)}")
        out.result(document)
    wrong = [f"{row['operation']} {row['case']}" for row in rows if not row["right"]]
    if wrong:
        raise KvqError(f"wrong results on this device, not timed: {', '.join(wrong)}")


def _measure(
    out: Output, experiments: Sequence, sizes: Any, place: Any, seconds: int | None, folder: Path, resume: bool
) -> dict[str, Any]:
    """Check and time the kernels; the document is written after each shape, so that an interrupted run can resume."""
    from kvq_cli.benchmarking.kernels import run
    from kvq_cli.benchmarking.kernels.timing import Timer
    from kvq_cli.benchmarking.machine import machine

    end = time.monotonic() + (seconds or float("inf"))
    document: dict[str, Any] = {"bench": "kernels", "dry": sizes.dry, "machine": machine(place), "rows": []}
    kept = resumable_result(out, folder / "kernels.json", document) if resume else None
    if kept is not None:
        document["rows"] = kept["rows"]
        out.note(f"{len({run.shape_key(row) for row in kept['rows']})} shapes were measured before")
    document["checked"] = []
    with out.progress() as progress:
        task = progress.add_task("checking", total=None)
        for row in run.check(experiments, sizes.to_check, place):
            document["checked"].append(row)
            progress.advance(task)
    out.note(f"{sum(row['right'] for row in document['checked'])} of {len(document['checked'])} cases are correct")
    timer = Timer(place, once=sizes.dry)
    document["copy_gb_s"] = round(timer.copy_rate() / 1e9, 1)
    measured_before = {run.shape_key(row) for row in document["rows"]}
    left = [one for one in run.all_shape_keys(experiments, sizes, place) if one not in measured_before]
    with out.progress() as progress:
        task = progress.add_task("measuring", total=len(left))
        groups = run.measure(
            experiments,
            sizes,
            place,
            timer,
            document["copy_gb_s"] * 1e9,
            wrong={(row["operation"], row["case"]) for row in document["checked"] if not row["right"]},
            measured=measured_before,
        )
        for number, rows in enumerate(groups, 1):
            document["rows"] += rows
            document["shapes_left"] = len(left) - number
            if place.type == "cuda":
                document["machine_after"] = machine(place)  # clocks under load
            write_result(folder, "kernels", document)
            progress.advance(task)
            if time.monotonic() > end:
                break
    if document.get("shapes_left"):
        out.warn(f"{document['shapes_left']} shapes are not measured yet: continue with --resume")
    return document


def draw(document: dict[str, Any], folder: Path, out: Output) -> str:
    """Plot the results if matplotlib is installed; returns the names of the written files, for a note."""
    from kvq_cli.benchmarking.kernels.plot import plot
    from kvq_cli.figures import has_matplotlib

    if not has_matplotlib():
        out.note("no plot: matplotlib is not installed")
        return f"{folder / 'kernels.json'}"
    if not plot(document, folder / "kernels.png"):
        out.note("no plot: no case was timed")
        return f"{folder / 'kernels.json'}"
    return f"{folder / 'kernels.json'} and {folder / 'kernels.png'}"


def _print(out: Output, document: dict) -> None:
    out.text(f"{document['machine']['device']}, copies {document['copy_gb_s']} GB/s")
    shape_names = ("model", "batch", "context")
    for operation in dict.fromkeys(row["operation"] for row in document["rows"]):
        rows = [row for row in document["rows"] if row["operation"] == operation]
        shown = [name for name in shape_names if name in rows[0]]
        table = []
        for row in rows:
            shape = [row[name] for name in shown]
            if "failed" in row:
                table.append([*shape, row["case"], row["failed"], None, None, None, None])
                continue
            us = row["us"]
            spread = f"{us['p20']:g}-{us['p80']:g}"
            percent = round(100 * row["of_copy"], 1)
            table.append([*shape, row["case"], us["p50"], spread, row["gb_s"], percent, row.get("ratio")])
        columns = [*shown, "case", "us p50", "p20-p80", "GB/s", "% of copy", "x best 16 bit"]
        out.table(columns, table, title=operation)


def _static(out: Output, names: list[str] | None, target: str | None, folder: Path) -> None:
    from kvq_kernels.aot_cases import operations
    from kvq_kernels.static import TARGETS, all_launches, reports

    from kvq_cli.benchmarking.kernels.lower_bounds import GRID, lower_bounds

    targets = list(TARGETS) if target is None else opt.names(target, "--target")
    for name in targets:
        if name not in TARGETS:
            raise UsageError(f"--target {name}: unknown; valid: {', '.join(TARGETS)}")
    for name in names or []:
        if name not in operations():
            raise UsageError(f"--operation {name}: unknown; valid: {', '.join(operations())}")
    check_writable(folder)
    wanted = [one for one in all_launches(targets) if names is None or one[0] in names]
    found: dict[tuple[str, str, str], Report] = {}
    try:
        with out.progress() as progress:
            task = progress.add_task("compiling", total=len(wanted))
            for one in reports(wanted):
                found[one.operation, one.name, one.target] = one
                progress.advance(task)
    except OSError as error:
        raise KvqError(f"--static: {error}") from None
    ordered = [found[one] for one in wanted]
    for name in targets:
        _print_static(out, name, [one for one in ordered if one.target == name])
    faults = [f"{one.target} {one.operation} {one.name}: {fault}" for one in ordered for fault in one.faults()]
    for fault in faults:
        out.warn(fault)
    rows = [
        {**vars(one), "faults": one.faults(), "floors_us": {f"{b} x {c}": lower_bounds(one, b, c) for b, c in GRID}}
        for one in ordered
    ]
    document = {"bench": "kernels", "static": True, "rows": rows, "faults": faults}
    out.note(f"written: {write_result(folder, 'static', document)}")
    out.result(document)
    if faults:
        raise KvqError(f"{len(faults)} faults in compiled code, listed above")


def _print_static(out: Output, target: str, found: Sequence[Report]) -> None:
    from kvq_kernels.static import SHARED

    from kvq_cli.benchmarking.kernels.lower_bounds import OF_TARGET, lower_bounds

    table = []
    for one in found:
        row = [one.operation, one.name, one.registers, one.spills, f"{one.shared / SHARED[target]:.0%}", one.i2f]
        row += [one.per_number or None, one.bits or None]
        if one.kind == "none" or not one.per_number:  # computes no attention
            row += [None] * 3
        else:
            least = lower_bounds(one, 1, 131072)
            row += [round(least["issue"], 1), round(least["bytes"], 1), round(least["limit"], 2)]
        table.append(row)
    columns = ["operation", "launch", "registers", "spilled", "shared", "I2F", "instructions", "bits"]
    columns += ["us by issue", "us by bytes", "x 16 bit at most"]
    gpu = OF_TARGET[target].gpu
    out.table(columns, table, title=f"{target}, per cached number; floors of 1 x 131072 tokens on {gpu}")

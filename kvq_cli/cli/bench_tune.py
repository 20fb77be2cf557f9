"""`kvq bench tune`: search launch configurations of the kernels for the installed GPU."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Annotated, Any

from kvq_cli.cli import options as opt
from kvq_cli.cli.bench_shared import OutDir, bench_option, kernel_device, write_result
from kvq_cli.cli.output import Output
from kvq_cli.files import check_writable

Operations = Annotated[
    str | None,
    bench_option(
        "--operation",
        metavar="NAMES",
        help="Operations to tune, separated by commas: decode_attention, quantized_matvec, quantize_pack, "
        "squat_quantize, assign_centroids, transform_attention, transform_pack (default: all).",
    ),
]
Seconds = Annotated[int, bench_option("--seconds", min=1, help="Duration of the search.")]
Dry = Annotated[
    bool,
    bench_option("--dry", help="Use tiny sizes and do not write the tables; without a GPU, in Triton's interpreter."),
]


def tune(
    operation: Operations = None,
    seconds: Seconds = 120,
    dry: Dry = False,
    out_dir: OutDir = Path("results/bench"),
    device: opt.Device = "auto",
    config: opt.Config = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Search faster launch configurations of the kernels and write them to kvq_kernels/*/tuning.json.

    The search starts from the present tables: a second run continues the first.
    """
    out = Output(as_json=as_json, quiet=quiet)
    names = None if operation is None else opt.names(operation, "--operation")
    place = kernel_device(device, dry)
    from kvq_cli.benchmarking.kernels import tune as search
    from kvq_cli.benchmarking.kernels.catalog import select_experiments
    from kvq_cli.benchmarking.kernels.experiment import Sizes
    from kvq_cli.benchmarking.kernels.timing import Timer
    from kvq_cli.benchmarking.machine import machine

    check_writable(out_dir)
    document: dict[str, Any] = {"bench": "tune", "dry": dry, "machine": machine(place)}
    classes: dict[tuple[str, str], dict[str, Any]] = {}
    start = time.monotonic()
    rows = search.tune(select_experiments(names), Sizes(dry), place, Timer(place, once=dry), seconds, write=not dry)
    with out.progress() as progress:
        task = progress.add_task("seconds of search", total=seconds)
        for row in rows:
            classes[row["operation"], row["class"]] = row
            tried = f"after {row['tried']} configurations: {row['best']}"
            out.note(f"{row['operation']} {row['class']}: {_gain(row['before_us'], row['us'])} {tried}")
            document["rows"] = list(classes.values())
            write_result(out_dir, "tune", document)
            progress.update(task, completed=min(seconds, time.monotonic() - start))
    out.note(f"written: {out_dir / 'tune.json'}")
    out.result(document)


def _gain(before: float, now: float) -> str:
    """The speed-up in words. Times are infinite where a configuration cannot run."""
    if math.isinf(now):
        return "none runs"
    if math.isinf(before):
        return f"{now:g} us, the first that runs,"
    return f"{before / now if now else 1.0:.2f}x"

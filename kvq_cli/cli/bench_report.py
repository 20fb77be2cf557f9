"""`kvq bench report`: compare GPU results with the performance targets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.output import Output
from kvq_cli.errors import KvqError

Folder = Annotated[
    Path, typer.Argument(metavar="[DIR]", help="Result folder of a GPU, or a folder that contains several.")
]


def report(
    folder: Folder = Path("benchmarks"),
    config: opt.Config = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Compare GPU results with the kernels' performance targets: which are reached, by how much others are missed."""
    out = Output(as_json=as_json, quiet=quiet)
    from kvq_cli.benchmarking.kernels.performance_targets import compare_with_targets, load_gpu_results

    found = load_gpu_results(folder)
    if not found:
        raise KvqError(f"no results of a GPU in {folder}: `make gpu` on a machine with one writes them to benchmarks/")
    documents = []
    for place, result in found.items():
        rows = compare_with_targets(result)
        machine = next(iter(result.values()))["machine"]
        versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
        title = f"{place}: {machine['device']}, {machine['date']}, {versions}"
        table = [
            [row["target"], row["where"], row["measured"], row["wanted"], row["stretch"], row["verdict"]]
            for row in rows
        ]
        out.table(["target", "where", "measured", "wanted", "stretch", "verdict"], table, title=title)
        documents.append({"place": str(place), "machine": machine, "rows": rows})
    out.result({"bench": "report", "results": documents})

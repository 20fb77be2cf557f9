"""`kvq bench`: time and memory, measured beside what one would use otherwise."""

from __future__ import annotations

import typer

from kvq_cli.cli.bench_calibrate import calibrate
from kvq_cli.cli.bench_generate import generate
from kvq_cli.cli.bench_kernels import kernels
from kvq_cli.cli.bench_report import report
from kvq_cli.cli.bench_tune import tune

app = typer.Typer(no_args_is_help=True, help="Measure time and memory.")
for _command in (kernels, tune, generate, calibrate, report):
    app.command()(_command)


@app.callback()
def bench() -> None:
    """Measure time and memory."""

"""`kvq bench`: benchmark time and memory against 16-bit baselines."""

from __future__ import annotations

import typer

from kvq_cli.cli.bench_calibrate import calibrate
from kvq_cli.cli.bench_generate import generate
from kvq_cli.cli.bench_kernels import kernels
from kvq_cli.cli.bench_report import report
from kvq_cli.cli.bench_tune import tune
from kvq_cli.cli.rules import AnnouncingCommand

app = typer.Typer(no_args_is_help=True, help="Benchmark time and memory of kernels, generation and calibration.")
for _command, _panel in (
    (generate, "Models"),
    (calibrate, "Models"),
    (kernels, "Kernel development"),
    (tune, "Kernel development"),
    (report, "Kernel development"),
):
    app.command(cls=AnnouncingCommand, rich_help_panel=_panel)(_command)


@app.callback()
def bench() -> None:
    """Benchmark time and memory of kernels, generation and calibration."""

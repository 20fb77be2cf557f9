"""`kvq results`: print tables of finished evaluations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvq_cli.cli.options import Json, names
from kvq_cli.cli.output import Output
from kvq_cli.cli.rules import unless
from kvq_cli.errors import KvqError, UsageError, reading

if TYPE_CHECKING:
    from kvq_cli.evaluation.runs import Run
    from kvq_cli.papers.side_by_side import SideBySide

PUBLISHED = "published"

Folder = Annotated[
    Path,
    typer.Argument(metavar="DIR", help="Result folder of `kvq eval` (its --out), or the folder of one method in it."),
]
Format = Annotated[
    Literal["table", "csv", "markdown", "json", "latex"],
    typer.Option("--format", help="Format of the table; json is the same as --json."),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="NAME",
        help="Print paired differences to this method on the same samples, with 95 % confidence intervals.",
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="NAME",
        help="Compare with published numbers: a table of the papers, like table-temporalkv-6, or `published` for all "
        "that contain at least two of these methods.",
    ),
]

With = Annotated[
    list[Path] | None,
    typer.Option(
        "--with",
        metavar="DIR",
        help="Add the methods of another result folder, of the same model, tasks and settings. May be repeated.",
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Plot scores over measured bits into a .png, .pdf or .svg file."),
]


RunNumber = Annotated[
    int | None,
    typer.Option(
        "--run",
        metavar="N",
        min=1,
        help="Show one run (default: the newest, with each method's result of most samples).",
    ),
]
Runs = Annotated[bool, typer.Option("--runs", help="List all runs: time, samples, methods and command.")]
_shown = unless(lambda values: not values["runs"], "--runs lists runs")
_means = unless(
    lambda values: not values["runs"] and values["baseline"] is None and values["against"] is None,
    "it shapes the table of means",
)
Columns = Annotated[
    str | None,
    typer.Option("--columns", metavar="TITLE,...", help="Print these columns only, in this order, by their titles."),
    _means,
]
Calibrations = Annotated[
    bool,
    typer.Option(
        "--calibrations",
        help="Print means over artifacts of the same method, ± their standard deviation: what another seed or text of "
        "the calibration changes.",
    ),
    _means,
]
Transpose = Annotated[bool, typer.Option("--transpose", help="Print one column per method."), _means]


def results(
    folder: Folder,
    with_: Annotated[With, _shown] = None,
    run: Annotated[RunNumber, _shown] = None,
    runs: Runs = False,
    format: Format = "table",
    baseline: Annotated[Baseline, _shown] = None,
    against: Annotated[Against, _shown] = None,
    plot: Annotated[Plot, _shown] = None,
    columns: Columns = None,
    calibrations: Calibrations = False,
    transpose: Transpose = False,
    as_json: Json = False,
) -> None:
    """Print the table of a finished evaluation: means ± standard errors.

    Bold: better than every other compressed cache beyond chance (95 %)."""
    out = Output(as_json=as_json or format == "json")
    if baseline is not None and against is not None:
        raise UsageError("--baseline with --against: use one of them")
    with reading(f"{folder}: not results of kvq", "run the evaluation again"):
        _print_results(
            out, format, folder, with_ or [], run, runs, baseline, against, plot, columns, calibrations, transpose
        )


def _print_results(
    out: Output,
    format: str,
    folder: Path,
    others: Sequence[Path],
    run: int | None,
    runs: bool,
    baseline: str | None,
    against: str | None,
    plot: Path | None,
    columns: str | None,
    calibrations: bool,
    transpose: bool,
) -> None:
    from kvq_cli.evaluation.merged import merged
    from kvq_cli.evaluation.runs import load_runs, shown_results

    shown = shown_results(folder, run)
    if runs:
        return _runs(out, format, load_runs(folder), folder)
    methods = merged(folder, shown.methods, others)
    if plot is not None:
        from kvq_cli.evaluation.plot import plot_comparison

        plot_comparison({"methods": methods}, plot)
        out.note(f"written: {plot}")
    for number, label, count in shown.fewer:
        out.note(f"run {number} has fewer samples of {label} ({count}): --run {number} shows it")
    for label, error in shown.failed.items():
        out.note(f"left out: {label}: {error}")
    if shown.others:
        out.note(f"with other tasks or settings: run {', '.join(map(str, shown.others))}; --runs lists all")
    chosen = None if columns is None else names(columns, "--columns")
    if baseline is not None:
        _differences(out, format, folder, methods, baseline)
    elif against is not None:
        _against(out, format, methods, against)
    elif calibrations:
        _calibrations(out, format, methods, chosen, transpose)
    else:
        _table(out, format, folder, methods, shown.failed, chosen, transpose)


def _runs(out: Output, format: str, recorded: Sequence[Run], folder: Path) -> None:
    from kvq_cli.evaluation.runs import samples

    if not recorded:
        out.note(f"{folder}: a version of kvq without records of runs wrote these results")
    columns = ["run", "time", "tasks", "n", "methods", "command"]
    columns[-1:-1] = ["failed"] if any(run.failed for run in recorded) else []
    listed = []
    for run in recorded:
        first = next(iter(run.methods.values()))
        listed.append(
            {
                "run": run.id,
                "time": run.time,
                "seconds": run.seconds,
                "tasks": list(first["n-samples"]),
                "n": samples(first),
                "methods": list(run.methods),
                "failed": dict(run.failed),
                "command": run.command,
            }
        )
    rows = [[", ".join(map(str, v)) if isinstance(v := run[c], (list, dict)) else v for c in columns] for run in listed]
    _print(out, format, columns, rows, labels=len(columns))
    out.result(listed)


def _table(
    out: Output,
    format: str,
    folder: Path,
    methods: Mapping[str, Mapping[str, Any]],
    failed: Mapping[str, str],
    chosen: Sequence[str] | None,
    transpose: bool,
) -> None:
    from kvq_cli.evaluation.chat_template import chat_template_note
    from kvq_cli.evaluation.formats import csv_text, escape_latex, in_bold, latex, markdown, with_errors
    from kvq_cli.evaluation.leaders import leaders
    from kvq_cli.evaluation.runs import describe_run, run_of
    from kvq_cli.evaluation.tabulate import tabulate

    table = tabulate(methods) if chosen is None else tabulate(methods).only(chosen)
    caption, origins = describe_run(next(iter(methods.values()))), _origins(methods)
    plain = format == "csv" or out.as_json
    best = [set[str]() for _ in table.columns] if plain else leaders(table, folder, methods)

    def with_origins(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> tuple[list[str], list[list[Any]]]:
        lines = [[*columns], *([*row] for row in rows)]
        if origins is not None:
            lines = [[*columns, "n", "run"], *([*row, *origins[row[0]]] for row in rows)]
        if transpose:
            lines = [list(line) for line in zip(*lines, strict=True)]
        return lines[0], lines[1:]

    if format == "csv":
        out.text(csv_text(*with_origins(*with_errors(table))))
    elif format == "latex":
        out.text(latex(*with_origins(table.titles, in_bold(table, best, r"\textbf{{{}}}", escape_latex))))
    elif format == "markdown":
        out.text(markdown(*with_origins(table.titles, in_bold(table, best, "**{}**")), labels=1))
    else:
        if transpose:
            scores = list(zip((column.title for column in table.columns), best, strict=True))
            best = [{title for title, labels in scores if label in labels} for label in table.rows]
        elif origins is not None:
            best += [set(), set()]
        titles, cells = with_origins(table.titles, table.cells())
        out.table(titles, cells, title=caption if origins is None else None, bold=best)
    if origins is not None:
        out.note("runs of the same tasks and settings are shown together; --run N shows one")
    if origins is None and format in ("csv", "latex", "markdown"):
        out.note(caption)
    if note := chat_template_note(next(iter(methods.values()))["config"].get("chat_template", {})):
        out.note(note)
    rows = {
        label: {column.title: asdict(entry) for column, entry in zip(table.columns, row, strict=True)}
        for label, row in table.rows.items()
    }
    runs = {label: run_of(one) for label, one in methods.items()}
    counts = {label: one["n-samples"] for label, one in methods.items()}
    columns = [asdict(column) for column in table.columns]
    out.result({"columns": columns, "rows": rows, "runs": runs, "n-samples": counts, "failed": dict(failed)})


def _calibrations(
    out: Output, format: str, methods: Mapping[str, Mapping[str, Any]], chosen: Sequence[str] | None, transpose: bool
) -> None:
    from kvq_cli.evaluation.calibrations import COUNT, over_calibrations

    table = over_calibrations(methods)
    if chosen is not None:
        table = table.only([*chosen, COUNT.title])
    lines = [table.titles, *table.cells()]
    if transpose:
        lines = [list(line) for line in zip(*lines, strict=True)]
    out.note("± standard deviation between calibrations; a row without it has one calibration, or none")
    _print(out, format, lines[0], lines[1:])
    rows = {
        label: {column.title: asdict(entry) for column, entry in zip(table.columns, row, strict=True)}
        for label, row in table.rows.items()
    }
    out.result({"columns": [asdict(column) for column in table.columns], "rows": rows})


def _origins(methods: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, int | None]] | None:
    """Number of samples and run of each method, by label; None if these are the same for all."""
    from kvq_cli.evaluation.runs import run_of, samples

    origins = {label: (samples(one), (run_of(one) or {}).get("id")) for label, one in methods.items()}
    return origins if len(set(origins.values())) > 1 else None


def _differences(
    out: Output, format: str, folder: Path, methods: Mapping[str, Mapping[str, Any]], baseline: str
) -> None:
    from kvq_cli.evaluation.paired import CAPTION, MARKS, difference_table, differences, match_label

    by_method = differences(folder, methods, baseline)
    if not any(by_method.values()):
        raise KvqError(f"{folder}: {baseline} and the other methods have no metric in common")
    base = match_label(baseline, methods)
    out.note(f"differences to {base}: {CAPTION}; {MARKS}")
    _print(out, format, *difference_table(by_method))
    rows = {label: {name: asdict(one) for name, one in row.items()} for label, row in by_method.items()}
    out.result({"baseline": base, "methods": rows})


def _against(out: Output, format: str, methods: Mapping[str, Mapping[str, Any]], name: str) -> None:
    from kvq_cli.papers.report import agreement_table
    from kvq_cli.papers.side_by_side import side_by_side
    from kvq_cli.papers.targets import target, targets

    model = next(iter(methods.values()))["config"]["model_args"]["name"]
    wanted = targets().values() if name == PUBLISHED else [target(name)]
    tables: list[SideBySide] = [side for each in wanted if (side := side_by_side(each, methods, model))]
    if not tables:
        raise KvqError(f"--against {name}: no column with at least two of these methods was measured here")
    for side in tables:
        out.text(f"{side.target.paper}, {side.target.what} ({side.target.id})")
        _print(out, format, side.columns, side.lines)
        _print(out, format, *agreement_table(side.agreements))
    out.result([{**asdict(side), "target": side.target.id} for side in tables])


def _print(out: Output, format: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], labels: int = 1) -> None:
    from kvq_cli.evaluation.formats import csv_text, latex, markdown

    if format == "markdown":
        out.text(markdown(columns, rows, labels))
    elif format in ("csv", "latex"):
        out.text((csv_text if format == "csv" else latex)(columns, rows))
    else:
        out.table(columns, rows)

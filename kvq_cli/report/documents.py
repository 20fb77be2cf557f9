"""Sections of studies, benchmarks and counted sizes: their settings, plots and tables, whatever rows they have."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq_cli.errors import reading
from kvq_cli.report.charts import Plot, Point, Series, draw, legend
from kvq_cli.report.comparison import Section
from kvq_cli.report.markup import Markup, join, tag
from kvq_cli.report.sources import ResultFolder, is_file_of
from kvq_cli.report.tables import Cell, pairs, table

#: Entries of a study that repeat its table, in a form for programs.
SKIPPED = ("numbers", "columns", "rows", "notes")
SPREAD = "Times are medians, with the 20th and 80th percentile in brackets, over n measurements."


def sections(found: ResultFolder) -> Iterator[Section]:
    """Title and content of each result file."""
    for stem, document in found.documents.items():
        command = found.record.get("command")
        with reading(found.path / f"{stem}.json", "make it again"):
            shown = tag("pre", shlex.join(map(str, command))) if command else None
            content = join(shown, _document(document, found.path / f"{stem}.png"))
        yield stem, content


def _document(document: Any, picture: Path) -> Markup:
    if _is_rows(document):
        return _rows_table(document)
    if not isinstance(document, Mapping):
        return tag("pre", str(document))
    rows = document.get("rows") or []
    facts = {key: value for key, value in document.items() if key not in SKIPPED and not _is_rows(value)}
    machine = facts.pop("machine", None)
    nested = {key: value for key, value in document.items() if key != "rows" and _is_rows(value)}
    return join(
        _benchmark_plots(document) or _picture(picture),
        table(list(document["columns"]), rows) if document.get("columns") and rows else None,
        (tag("p", SPREAD, class_="note"), _rows_table(rows)) if _is_rows(rows) else None,
        [tag("p", note) for note in document.get("notes", [])],
        [(tag("h3", key), _rows_table(value)) for key, value in nested.items()],
        pairs(facts | dict(machine if isinstance(machine, Mapping) else {})),
    )


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, Mapping) for row in value)


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> Markup:
    """A table with a column for each key of the rows."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return table(columns, [[_value(row.get(column)) for column in columns] for row in rows])


def _value(value: Any) -> Any:
    """A spread of times as its median with the 20th and 80th percentile and the number of measurements."""
    if isinstance(value, Mapping) and {"p20", "p50", "p80"} <= value.keys():
        n = f", n = {value['n']}" if "n" in value else ""
        return Cell(f"{value['p50']:.4g} [{value['p20']:.4g}, {value['p80']:.4g}]{n}", value["p50"])
    return value


def _picture(path: Path) -> Markup | None:
    """The figure beside a result file, inside the page."""
    if not is_file_of(path.parent, path):
        return None
    data = base64.b64encode(path.read_bytes()).decode()
    return tag("figure", tag("img", src=f"data:image/png;base64,{data}", alt=path.stem))


def _benchmark_plots(document: Mapping[str, Any]) -> Markup | None:
    """Plots of `kvq bench generate`: time per token and cache over the context, or throughput over the batch."""
    rows = document.get("rows") or []
    if document.get("bench") != "generate" or not _is_rows(rows):
        return None
    peers = {peer: style for style, peer in enumerate(dict.fromkeys(str(row["peer"]) for row in rows))}
    if all("tokens_s" in row or "failed" in row for row in rows):
        plots = [_over(rows, peers, "batch", "batch size", "tokens_s", "decoded tokens per second")]
    else:
        plots = []
        for batch in sorted({row["batch"] for row in rows}):
            same = [row for row in rows if row["batch"] == batch]
            times = [{**row, "ms": row["token_ms"]["p50"], "mib": row["cache_bytes"] / 2**20} for row in same]
            for key, label in (("ms", "ms per decoded token, median"), ("mib", "cache, MiB")):
                plots.append(_over(times, peers, "context", "context (tokens)", key, f"{label}, batch {batch}"))
    figures = [tag("figure", draw(plot)) for plot in plots if plot.series]
    return join(legend(list(peers.items())), tag("div", figures, class_="plots")) if figures else None


def _over(
    rows: Sequence[Mapping[str, Any]], peers: Mapping[str, int], x: str, x_label: str, y: str, label: str
) -> Plot:
    series = []
    for peer, style in peers.items():
        points = [
            Point(row[x], row[y], f"{peer}: {row[y]:.4g} at {row[x]}")
            for row in rows
            if row["peer"] == peer and row.get(y) is not None
        ]
        series += [Series(peer, style, points)] if points else []
    ticks = sorted({point.x for one in series for point in one.points})
    return Plot(f"{label} over {x_label}", x_label, label, series, log_x=True, zero=True, x_ticks=ticks)

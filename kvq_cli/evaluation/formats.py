"""Format tables as CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from kvq_cli.evaluation.tabulate import Table

_LATEX_ESCAPES = {"_": r"\_", "%": r"\%", "&": r"\&", "#": r"\#", "±": r"$\pm$"}


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([columns, *rows])
    return text.getvalue().rstrip("\n")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell_text, line)) + " |" for line in lines)


def latex(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A LaTeX `tabular` with booktabs rules."""
    head, *body = [" & ".join(_escape_latex(_cell_text(cell)) for cell in line) + r" \\" for line in [columns, *rows]]
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def with_best(table: Table, bold: str) -> list[list[Any]]:
    """Formatted cells with the best value of each column wrapped in `bold`, like `**{}**`."""
    best = [table.best(index) for index in range(len(table.columns))]
    return [
        [label, *(bold.format(cell) if label in best[index] else cell for index, cell in enumerate(cells))]
        for label, *cells in table.cells()
    ]


def with_errors(table: Table) -> tuple[list[str], list[list[Any]]]:
    """Columns and unrounded rows, with standard errors in separate columns."""
    has_errors = [
        any(row[index].error is not None for row in table.rows.values()) for index in range(len(table.columns))
    ]
    columns = ["method"]
    for column, errors in zip(table.columns, has_errors, strict=True):
        columns += [column.title, f"{column.title} stderr"] if errors else [column.title]
    rows = []
    for label, row in table.rows.items():
        cells: list[Any] = [label]
        for entry, errors in zip(row, has_errors, strict=True):
            cells += [entry.value, entry.error] if errors else [entry.value]
        rows.append(cells)
    return columns, rows


def _cell_text(cell: Any) -> str:
    if cell is None:
        return ""
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.5g}" if abs(cell) < 1e5 else f"{cell:.0f}"


def _escape_latex(text: str) -> str:
    return "".join(_LATEX_ESCAPES.get(letter, letter) for letter in text)

"""Format tables as CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

from kvq_cli.evaluation.tabulate import Table

_LATEX_ESCAPES = {letter: f"\\{letter}" for letter in "_%&#${}"} | {"±": r"$\pm$", "†": r"$\dagger$", "\n": " "}
_NAMED = {"\\": "backslash", "~": "asciitilde", "^": "asciicircum", "<": "less", ">": "greater", "|": "bar"}
_LATEX_ESCAPES |= {letter: f"\\text{name}{{}}" for letter, name in _NAMED.items()}
_MARKDOWN = re.compile(r"[\\`*\[\]<>|~$&]|(?<!\w)_|_(?!\w)")  # an underscore inside a word is no emphasis
_FORMULA = re.compile(r"[=+\-@\t\r]")
#: Cells of `paired.interval`, which begin with a sign.
_INTERVAL = re.compile(r"[-+\d.e]+ \[[-+\d.e]+, [-+\d.e]+\]( [*†])?")


class Formatted(str):
    """Text in the syntax of the output format, which is not escaped again."""


def csv_text(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Comma-separated values. Text that spreadsheets would take for a formula begins with a quote, `'=1+1`."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_csv_cell(cell) for cell in row] for row in [columns, *rows])
    return text.getvalue().rstrip("\n")


def markdown(columns: Sequence[str], rows: Sequence[Sequence[Any]], labels: int = 0) -> str:
    """A Markdown table. labels: number of first columns, and the head, that are text without markup, to be escaped."""
    if labels:
        rows = [[*map(escape_markdown, map(_cell_text, row[:labels])), *row[labels:]] for row in rows]
        columns = [escape_markdown(column) for column in columns]
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_markdown_cell, line)) + " |" for line in lines)


def escape_markdown(text: str) -> str:
    """Text that Markdown shows as it is."""
    return _MARKDOWN.sub(r"\\\g<0>", text)


def latex(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A LaTeX `tabular` with booktabs rules. Cells are escaped, except those that are `Formatted`."""
    head, *body = [" & ".join(map(_latex_cell, line)) + r" \\" for line in [columns, *rows]]
    lines = [rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"])


def in_bold(
    table: Table, labels: Sequence[Collection[str]], bold: str, escape: Callable[[str], str] = str
) -> list[list[Any]]:
    """Formatted cells, those of each column's `labels` escaped and wrapped in `bold`, like `**{}**`."""

    def wrapped(cell: Any) -> Formatted:
        return Formatted(bold.format(escape(str(cell))))

    return [
        [label, *(wrapped(cell) if label in labels[index] else cell for index, cell in enumerate(cells))]
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


def _csv_cell(cell: Any) -> Any:
    if not isinstance(cell, str):
        return cell
    text = cell.replace("\r", " ")  # Python 3.11 writes it without quotes: a reader would begin a row
    return f"'{text}" if _FORMULA.match(cell) and not (_is_number(cell) or _INTERVAL.fullmatch(cell)) else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _markdown_cell(cell: Any) -> str:
    """A bar or a line break would end the cell."""
    return re.sub(r"(?<!\\)\|", r"\|", _cell_text(cell)).replace("\n", " ")


def _latex_cell(cell: Any) -> str:
    return cell if isinstance(cell, Formatted) else escape_latex(_cell_text(cell))


def escape_latex(text: str) -> str:
    """Text that LaTeX shows as it is."""
    return "".join(_LATEX_ESCAPES.get(letter, letter) for letter in text)

"""Print tables that fit the terminal: as columns, in several tables if there are too many, or as one record per row."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from kvq_cli.cli.failures import escaped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

T = TypeVar("T")
MAX_CELL_LINES = 4
"""Approximate number of lines that a cell may wrap to."""
MAX_UNWRAPPED = 17
"""Longest cell that is never wrapped, like `1, 2, 3, 4, 8, 16` or `10.5 MiB (0.25%)`."""
_COLUMN_GAP, _MARGINS = 2, 2
"""Blanks between two columns, and at both ends of a line together."""


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    title: str | None = None,
    bold: Sequence[Collection[str]] = (),
    labels: int = 1,
) -> None:
    """Print a table; numeric columns are aligned right. bold, labels: as in `Output.table`.

    On a terminal too narrow for all columns, several tables are printed, each with the `labels`; on one too narrow for
    the whole words of one more column, each row is printed as a record with one line per column. Files and pipes
    have no width limit.
    """
    from rich.text import Text

    columns = [escaped(column) for column in columns]
    cells = [[_cell(value) for value in row] for row in rows]
    heads = [_min_max_width(console, text, whole=False) for text in columns]
    widths = [[head, *(_min_max_width(console, row[index]) for row in cells)] for index, head in enumerate(heads)]
    min_widths, max_widths = ([max(width[bound] for width in column) for column in widths] for bound in (0, 1))
    is_bold = [[False, *(row[0] in labels for labels in bold)] if bold else [False] * len(row) for row in rows]
    if not console.is_terminal:
        console.width = max(console.width, sum(max_widths) + _frame(len(columns)))
    if title is not None:
        console.print(Text(escaped(title), style="italic"))
    tables = _split(min_widths, labels, console.width)
    if tables is None:
        console.print(_records(columns, cells, is_bold, console.width))
        return
    numeric = [all(_is_number(row[index]) for row in rows) for index in range(len(columns))]
    for chosen in tables:
        room = console.width - _frame(len(chosen))
        column_widths = _distribute(_at(min_widths, chosen), _at(max_widths, chosen), room)
        shown = [_at(row, chosen) for row in cells], [_at(row, chosen) for row in is_bold]
        console.print(_columns(_at(columns, chosen), *shown, _at(numeric, chosen), column_widths))


def _frame(columns: int) -> int:
    """Characters of a line beside its cells."""
    return _COLUMN_GAP * (columns - 1) + _MARGINS


def _at(values: Sequence[T], places: Sequence[int]) -> list[T]:
    return [values[place] for place in places]


def _split(min_widths: Sequence[int], labels: int, width: int) -> list[list[int]] | None:
    """The columns of as few tables as fit the width, each with the first `labels` columns; None where that and one more
    do not fit."""
    first = list(range(min(labels, len(min_widths))))
    tables = [first]
    for index in range(len(first), len(min_widths)):
        for chosen in ([*tables[-1], index], [*first, index]):
            if sum(_at(min_widths, chosen)) + _frame(len(chosen)) <= width:
                tables = [*tables[:-1], chosen] if len(chosen) == len(tables[-1]) + 1 else [*tables, chosen]
                break
        else:
            return None
    return tables


def _columns(
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
    is_bold: Sequence[Sequence[bool]],
    numeric: Sequence[bool],
    widths: Sequence[int],
) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column, right, width in zip(columns, numeric, widths, strict=True):
        table.add_column(Text(column), justify="right" if right else "left", overflow="fold", width=width)
    for row, bold in zip(cells, is_bold, strict=True):
        table.add_row(*map(_styled, row, bold))
    return table


def _records(
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
    is_bold: Sequence[Sequence[bool]],
    width: int,
) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(max_width=width // 2, overflow="fold")
    table.add_column(overflow="fold")
    for row, bold in zip(cells, is_bold, strict=True):
        table.add_row("")
        for column, cell, cell_bold in zip(columns, row, bold, strict=True):
            table.add_row(_styled(column, True), _styled(cell, cell_bold))
    table.add_row("")
    return table


def _styled(cell: str, bold: bool) -> Text:
    from rich.text import Text

    return Text(cell, style="bold" if bold else "")


def _distribute(min_widths: Sequence[int], max_widths: Sequence[int], total: int) -> list[int]:
    """Column widths between `min_widths` and `max_widths` that fill `total`, with the extra width shared evenly."""
    widths, spare = list(min_widths), total - sum(min_widths)
    growth = [high - low for low, high in zip(min_widths, max_widths, strict=True)]
    by_growth = sorted(range(len(widths)), key=lambda index: growth[index])
    for place, index in enumerate(by_growth):
        extra = min(growth[index], spare // (len(by_growth) - place))
        widths[index] += extra
        spare -= extra
    return widths


def _min_max_width(console: Console, text: str, *, whole: bool = True) -> tuple[int, int]:
    """Column widths for a text: minimum (longest word, at most `MAX_CELL_LINES` lines) and maximum (a single line).

    whole: do not wrap a short text.
    """
    from rich.text import Text

    word, line = console.measure(Text(text), options=console.options.update(max_width=sys.maxsize))
    return line if whole and line <= MAX_UNWRAPPED else max(word, -(-line // MAX_CELL_LINES)), line


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"
    return escaped(str(value))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))

"""Tables that fit where they are printed: columns side by side, or one record below the other."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

LINES = 4
"""About as many lines a cell may take beside others."""
_BETWEEN, _EDGES = 3, 2
"""Blanks between two columns, and at both ends of a line."""


def print_table(
    console: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    title: str | None = None,
    bold: Sequence[Collection[str]] = (),
) -> None:
    """Print a table. On a terminal that is too narrow for columns that break no words, each row becomes a record, with
    one line for each column. A file or a pipe has no edge.

    Columns in which all cells are numbers stand right. bold: as `Output.table` takes it.
    """
    from rich.text import Text

    cells = [[_cell(value) for value in row] for row in rows]
    sizes = [[_size(console, text) for text in texts] for texts in zip(columns, *cells, strict=True)]
    least, most = ([max(size[bound] for size in column) for column in sizes] for bound in (0, 1))
    best = [[False, *(row[0] in found for found in bold)] if bold else [False] * len(row) for row in rows]
    frame = _BETWEEN * (len(columns) - 1) + _EDGES
    if not console.is_terminal:
        console.width = max(console.width, sum(most) + frame)
    if title is not None:
        console.print(Text(title, style="italic"))
    if sum(least) + frame > console.width:
        console.print(_records(columns, cells, best, console.width))
        return
    numeric = [all(_is_number(row[index]) for row in rows) for index in range(len(columns))]
    widths = _shared(least, most, console.width - frame)
    console.print(_side_by_side(columns, cells, best, numeric, widths))


def _side_by_side(
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
    best: Sequence[Sequence[bool]],
    numeric: Sequence[bool],
    widths: Sequence[int],
) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, right, width in zip(columns, numeric, widths, strict=True):
        table.add_column(column, justify="right" if right else "left", overflow="fold", width=width)
    for row, bold in zip(cells, best, strict=True):
        table.add_row(*map(_styled, row, bold))
    return table


def _records(
    columns: Sequence[str],
    cells: Sequence[Sequence[str]],
    best: Sequence[Sequence[bool]],
    width: int,
) -> Table:
    from rich.table import Table

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="bold", max_width=width // 2, overflow="fold")
    table.add_column(overflow="fold")
    for row, bold in zip(cells, best, strict=True):
        table.add_row("")
        for column, cell, one in zip(columns, row, bold, strict=True):
            table.add_row(column, _styled(cell, one))
    table.add_row("")
    return table


def _styled(cell: str, bold: bool) -> Text:
    from rich.text import Text

    return Text(cell, style="bold" if bold else "")


def _shared(least: Sequence[int], most: Sequence[int], room: int) -> list[int]:
    """Widths of at least `least` and at most `most` that use `room`, as evenly as they can."""
    widths, spare = list(least), room - sum(least)
    wanting = sorted(range(len(least)), key=lambda index: most[index] - least[index])
    for place, index in enumerate(wanting):
        more = min(most[index] - least[index], spare // (len(wanting) - place))
        widths[index] += more
        spare -= more
    return widths


def _size(console: Console, text: str) -> tuple[int, int]:
    """How narrow a column may be for this text, as its longest word and as wide as `LINES` lines need, and how wide."""
    from rich.text import Text

    word, line = console.measure(Text(text), options=console.options.update(max_width=sys.maxsize))
    return max(word, -(-line // LINES)), line


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.1f}"
    return str(value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))

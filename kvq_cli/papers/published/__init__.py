"""The numbers that the four papers print: their tables cell by cell, and numbers of abstracts and figures as text."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

PAPERS = {"TemporalKV": "temporalkv.csv", "SQuat": "squat.csv", "InnerQ": "innerq.csv", "XQuant": "xquant.csv"}


@dataclass(frozen=True)
class Cell:
    """A number in a paper. table: its number there, or `abstract`, `text`, `figure 3`; model: as the paper writes it,
    empty where the number belongs to none."""

    paper: str
    table: str
    model: str
    row: str
    column: str
    value: float


def rows(name: str) -> list[dict[str, str]]:
    """The lines of one of the package's CSV files."""
    return list(csv.DictReader(files(__package__).joinpath(name).read_text(encoding="utf-8").splitlines()))


@cache
def cells(paper: str, table: str) -> tuple[Cell, ...]:
    """The cells of a table in the order in which the paper prints them; none for a table that is not there."""
    found = [Cell(**{**row, "value": float(row["value"])}) for row in rows(PAPERS[paper])]
    return tuple(cell for cell in found if cell.table == table)


def value(paper: str, table: str, model: str, row: str, column: str) -> float:
    """One number; KeyError where the paper has none there."""
    for cell in cells(paper, table):
        if (cell.model, cell.row, cell.column) == (model, row, column):
            return cell.value
    raise KeyError(f"{paper}, table {table}: no {model or 'number'}, {row}, {column}")

"""The numbers that the four papers print: every cell of their tables, and numbers from abstracts, figures and text."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

PAPERS = {"TemporalKV": "temporalkv.csv", "SQuat": "squat.csv", "InnerQ": "innerq.csv", "XQuant": "xquant.csv"}


@dataclass(frozen=True)
class Cell:
    """A printed number. table: the table's number, or `abstract`, `text`, `figure 3`; model: as the paper writes it,
    empty for a number that belongs to no model."""

    paper: str
    table: str
    model: str
    row: str
    column: str
    value: float


def rows(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file of this package, as dicts."""
    return list(csv.DictReader(files(__package__).joinpath(name).read_text(encoding="utf-8").splitlines()))


@cache
def cells(paper: str, table: str) -> tuple[Cell, ...]:
    """The cells of a table in the paper's order; empty for an unknown table."""
    return tuple(
        Cell(row["paper"], row["table"], row["model"], row["row"], row["column"], float(row["value"]))
        for row in rows(PAPERS[paper])
        if row["table"] == table
    )


def value(paper: str, table: str, model: str, row: str, column: str) -> float:
    """The number of one cell; KeyError if the paper prints none there."""
    for cell in cells(paper, table):
        if (cell.model, cell.row, cell.column) == (model, row, column):
            return cell.value
    raise KeyError(f"{paper}, table {table}: no {model or 'number'}, {row}, {column}")

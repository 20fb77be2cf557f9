"""HTML tables: numbers aligned right with their exact value as a sort key, wide tables scroll inside their box."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvq_cli.report.markup import Markup, tag

#: Texts longer than this wrap inside their cell.
MAX_LINE = 40


@dataclass(frozen=True)
class Cell:
    """A cell whose text is not just its value. value: sort key; best: bold; tip: shown when the pointer is above."""

    text: str | Markup
    value: float | None = None
    best: bool = False
    tip: str | None = None


def table(columns: Sequence[str | Markup], rows: Sequence[Sequence[Any]]) -> Markup:
    """A table of values or `Cell`s; the first column holds the names of the rows."""
    numeric = [any(_is_number(row[index]) for row in rows) for index in range(len(columns))]
    head = [tag("th", title, scope="col", class_=_number(right)) for title, right in zip(columns, numeric, strict=True)]
    body = [
        tag("tr", [_cell(value, index, right) for index, (value, right) in enumerate(zip(row, numeric, strict=True))])
        for row in rows
    ]
    return tag("div", tag("table", tag("thead", tag("tr", head)), tag("tbody", body)), class_="scroll", tabindex="0")


def pairs(entries: Mapping[str, Any]) -> Markup:
    """A list of names and values, without those that are None or empty."""
    shown = [
        (tag("dt", name), tag("dd", value_text(value)))
        for name, value in entries.items()
        if value not in (None, "", [], {})
    ]
    return tag("dl", shown)


def value_text(value: Any) -> str:
    """A value of a result file as text: `on` for True, entries joined by commas."""
    if isinstance(value, str):
        return value  # Markup stays Markup
    if value is None:
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={value_text(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(value_text, value))
    return str(value)


def _cell(value: Any, index: int, right: bool) -> Markup:
    cell = value if isinstance(value, Cell) else Cell(value_text(value), value if _is_number(value) else None)
    classes = [_number(right), "best" if cell.best else None, "wrap" if index and len(cell.text) > MAX_LINE else None]
    if isinstance(cell.text, Markup):
        classes.remove("wrap") if "wrap" in classes else None
    attributes = {
        "class_": " ".join(filter(None, classes)) or None,
        "data_value": _sort_key(cell.value),
        "title": cell.tip,
    }
    return tag("th", cell.text, scope="row", **attributes) if index == 0 else tag("td", cell.text, **attributes)


def _sort_key(value: float | None) -> str | None:
    """The number that sorts a row, in 9 significant digits: the text beside it has fewer."""
    return f"{value:.9g}" if isinstance(value, float) else None if value is None else str(value)


def _number(right: bool) -> str | None:
    return "number" if right else None


def _is_number(value: Any) -> bool:
    if isinstance(value, Cell):
        return value.value is not None
    return isinstance(value, (int, float)) and not isinstance(value, bool)

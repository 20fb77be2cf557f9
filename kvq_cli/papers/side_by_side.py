"""Our tables beside the papers': row by row, and how far they order methods alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from kvq_cli.evaluation.tabulate import EXACT, Table, tabulate
from kvq_cli.methods.registry import build_parsed, from_config, to_config
from kvq_cli.papers.published import cells
from kvq_cli.papers.targets import Target

#: Published columns in which lower is better; in all others higher is.
LOWER = ("perplexity", "Wiki2", "C4")
#: Options that say which tokens stay exact: a method is the same row with other windows.
WINDOWS = ("sinks", "recent", "residual")


@dataclass(frozen=True)
class Agreement:
    """Pairs of methods that the paper ranks in a column, and how many our column ranks the same way.

    same_bits: the same of the pairs with equal nominal bits alone, which no method wins by its bits.
    """

    model: str
    published: str
    measured: str
    same: int
    pairs: int
    same_bits: tuple[int, int]


@dataclass(frozen=True)
class Beside:
    """A published table beside ours. columns: titles; lines: row, label, then numbers; agreements: by column."""

    target: Target
    columns: list[str]
    lines: list[list[Any]]
    agreements: list[Agreement]


def beside(target: Target, methods: Mapping[str, Mapping], model: str) -> Beside | None:
    """The target's published table beside the methods of a comparison; None where there are no two compressed methods
    in it, or no column that was measured."""
    labels = _labels(target.rows(model), methods)
    wanted = target.columns_of(model)
    compressed = [label for label in labels.values() if methods[label]["config"]["method"]["name"] != EXACT]
    if target.table is None or len(compressed) < 2 or not wanted:
        return None
    table = tabulate(methods)
    published = [cell for cell in cells(target.paper, target.table) if cell.row in labels and cell.column in wanted]
    if not published or not any(title in table.titles for titles in wanted.values() for title in titles):
        return None
    sources = list(dict.fromkeys((cell.model, cell.column) for cell in published))
    ours = list(dict.fromkeys(title for _, column in sources for title in wanted[column]))
    ours = [title for title in ours if title in table.titles]
    printed = {(cell.model, cell.column, cell.row): cell.value for cell in published}
    values = {title: {label: entry.value for label, entry in table.column(title).items()} for title in ours}
    lines = [
        [row, label, *(printed.get((*source, row)) for source in sources), *(values[title][label] for title in ours)]
        for row, label in labels.items()
    ]
    agreements = [
        _agreement(source, title, {row: printed.get((*source, row)) for row in labels}, labels, table, methods)
        for source in sources
        for title in wanted[source[1]]
        if title in ours
    ]
    titles = ["row", "method", *(f"{model} {column}".strip() + " (paper)" for model, column in sources)]
    return Beside(target, [*titles, *(f"{title} (kvq)" for title in ours)], lines, agreements)


def _labels(rows: Mapping[str, str], methods: Mapping[str, Mapping]) -> dict[str, str]:
    """Published row -> label of the method that it is, windows aside unless several differ by these alone."""
    configs = {label: to_config(from_config(one["config"]["method"])) for label, one in methods.items()}
    found = {}
    for row, text in rows.items():
        own = to_config(build_parsed(text))
        alike = [label for label, config in configs.items() if config == own]
        alike += [label for label, config in configs.items() if _same(config, own)]
        if alike:
            found[row] = alike[0]
    return found


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return {**one, **dict.fromkeys(WINDOWS)} == {**other, **dict.fromkeys(WINDOWS)}


def _agreement(
    source: tuple[str, str],
    title: str,
    printed: Mapping[str, float | None],
    labels: Mapping[str, str],
    table: Table,
    methods: Mapping[str, Mapping],
) -> Agreement:
    ours = {row: table.column(title)[label].value for row, label in labels.items()}
    better = next(column.better for column in table.columns if column.title == title)
    sign = -1 if source[1] in LOWER else 1
    configs = {row: methods[label]["config"]["method"] for row, label in labels.items()}
    rows = [row for row in labels if configs[row]["name"] != EXACT and None not in (printed[row], ours[row])]
    counts = {True: [0, 0], False: [0, 0]}
    for a, b in combinations(rows, 2):
        if printed[a] == printed[b]:  # the paper ranks neither first
            continue
        same_bits = configs[a].get("bits") == configs[b].get("bits")
        counts[same_bits][0] += sign * (printed[a] - printed[b]) * better * (ours[a] - ours[b]) > 0
        counts[same_bits][1] += 1
    total = [counts[True][index] + counts[False][index] for index in (0, 1)]
    return Agreement(source[0], source[1], title, *total, tuple(counts[True]))

"""Published tables next to measured ones, and how many pairs of methods both rank alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from kvq_cli.evaluation.compared_methods import WINDOW_OPTIONS
from kvq_cli.evaluation.tabulate import EXACT, Table, tabulate
from kvq_cli.methods.registry import build_parsed, from_config, to_config
from kvq_cli.papers.published import cells
from kvq_cli.papers.targets import Target

#: Published columns in which lower is better; in all others higher is.
LOWER_IS_BETTER = ("perplexity", "Wiki2", "C4")


@dataclass(frozen=True)
class Agreement:
    """How many pairs of methods a published column and a measured column rank alike.

    same: pairs ranked alike, of `pairs` that both rank. same_bits: the same two counts, of pairs with equal nominal
    bits alone, in which neither method wins by having more bits. ties: pairs that the paper ranks and we measure equal.
    """

    model: str
    published: str
    measured: str
    same: int
    pairs: int
    same_bits: tuple[int, int]
    ties: int


@dataclass(frozen=True)
class SideBySide:
    """A published table next to the measured one. columns: titles; lines: row, label, then numbers; agreements: one
    per pair of columns."""

    target: Target
    columns: list[str]
    lines: list[list[Any]]
    agreements: list[Agreement]


def side_by_side(target: Target, methods: Mapping[str, Mapping], model: str) -> SideBySide | None:
    """The target's published table next to `methods`, a comparison's documents by label.

    None where fewer than two compressed methods are rows of the table, or none of its columns was measured.
    """
    labels = row_labels(target.rows(model), methods)
    wanted = target.columns_of(model)
    compressed = [label for label in labels.values() if methods[label]["config"]["method"]["name"] != EXACT]
    if target.table is None or len(compressed) < 2 or not wanted:
        return None
    table = tabulate(methods)
    published = [cell for cell in cells(target.paper, target.table) if cell.row in labels and cell.column in wanted]
    if not published or not any(title in table.titles for titles in wanted.values() for title in titles):
        return None
    sources = list(dict.fromkeys((cell.model, cell.column) for cell in published))
    measured = list(dict.fromkeys(title for _, column in sources for title in wanted[column]))
    measured = [title for title in measured if title in table.titles]
    printed = {(cell.model, cell.column, cell.row): cell.value for cell in published}
    values = {title: {label: entry.value for label, entry in table.column(title).items()} for title in measured}
    lines = [
        [
            row,
            label,
            *(printed.get((*source, row)) for source in sources),
            *(values[title][label] for title in measured),
        ]
        for row, label in labels.items()
    ]
    agreements = [
        _agreement(source, title, {row: printed.get((*source, row)) for row in labels}, labels, table, methods)
        for source in sources
        for title in wanted[source[1]]
        if title in measured
    ]
    titles = ["row", "method", *(f"{model} {column}".strip() + " (paper)" for model, column in sources)]
    return SideBySide(target, [*titles, *(f"{title} (kvq)" for title in measured)], lines, agreements)


def row_labels(rows: Mapping[str, str], methods: Mapping[str, Mapping]) -> dict[str, str]:
    """Published row -> label of its method, where it was measured; window options are ignored unless several methods
    or rows differ in these alone."""
    configs = {label: to_config(from_config(method["config"]["method"])) for label, method in methods.items()}
    wanted = {row: to_config(build_parsed(text)) for row, text in rows.items()}
    others = {label: config for label, config in configs.items() if config not in wanted.values()}
    labels = {}
    for row, options in wanted.items():
        matches = [label for label, config in configs.items() if config == options]
        matches += [label for label, config in others.items() if _same_but_windows(config, options)]
        if matches:
            labels[row] = matches[0]
    return labels


def _same_but_windows(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return {**first, **dict.fromkeys(WINDOW_OPTIONS)} == {**second, **dict.fromkeys(WINDOW_OPTIONS)}


def _agreement(
    source: tuple[str, str],
    title: str,
    printed: Mapping[str, float | None],
    labels: Mapping[str, str],
    table: Table,
    methods: Mapping[str, Mapping],
) -> Agreement:
    better = next(column.better for column in table.columns if column.title == title)
    sign = -1 if source[1] in LOWER_IS_BETTER else 1
    configs = {row: methods[label]["config"]["method"] for row, label in labels.items()}
    scores: dict[str, tuple[float, float]] = {}  # published, measured
    for row, label in labels.items():
        published, measured = printed[row], table.column(title)[label].value
        if configs[row]["name"] != EXACT and published is not None and measured is not None:
            scores[row] = (sign * published, better * measured)
    pairs = same = equal_pairs = equal_same = ties = 0
    for (a, (published_a, measured_a)), (b, (published_b, measured_b)) in combinations(scores.items(), 2):
        if published_a == published_b:  # the paper ranks neither first
            continue
        if measured_a == measured_b:
            ties += 1
            continue
        agrees = (published_a - published_b) * (measured_a - measured_b) > 0
        pairs, same = pairs + 1, same + agrees
        if configs[a].get("bits") == configs[b].get("bits"):
            equal_pairs, equal_same = equal_pairs + 1, equal_same + agrees
    return Agreement(source[0], source[1], title, same, pairs, (equal_same, equal_pairs), ties)

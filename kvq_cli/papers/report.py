"""Write a finished target's tables: measured and published scores, and paired differences between methods."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvq_cli.evaluation.formats import in_bold, markdown
from kvq_cli.evaluation.leaders import LEADING, leaders
from kvq_cli.evaluation.paired import CAPTION, MARKS, difference_table, differences, interval
from kvq_cli.evaluation.tabulate import EXACT, Table, tabulate
from kvq_cli.files import write_text
from kvq_cli.papers.compact import compact_text, rounded
from kvq_cli.papers.scores import write_scores
from kvq_cli.papers.side_by_side import Agreement, SideBySide, side_by_side
from kvq_cli.papers.targets import Target

TABLE, DIFFERENCES, CLAIMS = "table.md", "differences.json", "claims.md"


def write_report(target: Target, model: str, folder: Path) -> None:
    """Write `table.md`, `differences.json` and `scores.json` from the target's `comparison.json`; for a target with
    `pairs`, also `claims.md`: whether the method that a paper calls better has the lower perplexity."""
    methods = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))["methods"]
    baseline = next((label for label in methods if label != EXACT), next(iter(methods)))
    by_method = differences(folder, methods, baseline)
    by_label = {label: {name: asdict(each) for name, each in row.items()} for label, row in by_method.items()}
    write_text(folder / DIFFERENCES, compact_text(rounded({"baseline": baseline, "methods": by_label})))
    write_scores(folder, methods)
    table = tabulate(methods)
    parts = [f"# {target.id}", f"{target.paper}: {target.what}, on {model}.", target.note]
    parts += [f"Mean ± standard error. {LEADING}"]
    parts += [markdown(table.titles, in_bold(table, leaders(table, folder, methods), "**{}**"))]
    if compared := side_by_side(target, methods, model):
        parts += ["## Beside the paper", markdown(compared.columns, compared.lines), *agreement_lines(compared)]
    if target.pairs:
        write_text(folder / CLAIMS, markdown(*claims_table(target, folder, methods, table)) + "\n")
    if by_method:
        parts += [f"## Differences to {baseline}", f"{CAPTION}; {MARKS}.", markdown(*difference_table(by_method))]
    write_text(folder / TABLE, "\n\n".join(part for part in parts if part) + "\n")


def claims_table(
    target: Target, folder: Path, methods: Mapping[str, Mapping], table: Table
) -> tuple[list[str], list[list[Any]]]:
    """A row per pair of methods: perplexity, KL and bits of both, the difference of their losses, and whether the
    better method's loss is lower; `?` if the difference may be chance. Pairs with a method that the comparison left out
    have none."""
    columns = ["paper", "better", "than", "perplexity", "KL to fp16", "measured bits", "difference in loss", "holds"]
    shown = {title: table.column(title) for title in columns[3:6]}
    rows = []
    for paper, better, than in target.pairs:
        if not {better, than} <= methods.keys():
            continue
        losses = differences(folder, {name: methods[name] for name in (better, than)}, than)[better]
        # Over all texts where there are several.
        loss = losses.get("perplexity loss") or next(each for name, each in losses.items() if name.endswith("loss"))
        both = [
            f"{column[better].value:.{digits}g} against {column[than].value:.{digits}g}"
            for column, digits in zip(shown.values(), (4, 3, 3), strict=True)
        ]
        verdict = ("yes" if loss.mean < 0 else "no") + ("" if loss.differs else "?")
        rows.append([paper, better, than, *both, interval(loss), verdict])
    return columns, rows


def agreement_table(agreements: list[Agreement]) -> tuple[list[str], list[list[Any]]]:
    """How many pairs of methods both columns rank alike, a row per pair of columns."""
    columns = ["paper's column", "kvq's column", "pairs ranked alike", "of equal bits alone"]
    rows = [
        [f"{each.model} {each.published}".strip(), each.measured, f"{each.same} of {each.pairs}"]
        + ["{} of {}".format(*each.same_bits)]
        for each in agreements
    ]
    return columns, rows


def agreement_lines(compared: SideBySide) -> list[str]:
    """The agreement table as Markdown, with the sentence above it."""
    return ["Pairs of compressed methods that the paper ranks, and how many kvq ranks alike:"] + [
        markdown(*agreement_table(compared.agreements))
    ]

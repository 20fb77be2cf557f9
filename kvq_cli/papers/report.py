"""What a target's folder says to a reader: the table, the paper's beside it, and differences sample by sample."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvq_cli.evaluation.formats import markdown, with_best
from kvq_cli.evaluation.paired import Difference, differences
from kvq_cli.evaluation.tabulate import EXACT, Table, tabulate
from kvq_cli.files import write_json, write_text
from kvq_cli.papers.side_by_side import Agreement, Beside, beside
from kvq_cli.papers.targets import Target

TABLE, DIFFERENCES, CLAIMS = "table.md", "differences.json", "claims.md"


def write_report(target: Target, model: str, folder: Path) -> None:
    """Write `table.md` and `differences.json` beside the target's `comparison.json`; where the target has `pairs`,
    `claims.md`: whether the methods that papers call better are."""
    methods = json.loads((folder / "comparison.json").read_text(encoding="utf-8"))["methods"]
    baseline = next((label for label in methods if label != EXACT), next(iter(methods)))
    found = differences(folder, methods, baseline)
    by_label = {label: {name: asdict(one) for name, one in row.items()} for label, row in found.items()}
    write_json(folder / DIFFERENCES, {"baseline": baseline, "methods": by_label})
    table = tabulate(methods)
    parts = [f"# {target.id}", f"{target.paper}: {target.what}, on {model}.", target.note]
    parts += ["Best of the compressed caches in bold; mean ± standard error.", ""]
    parts += [markdown(table.titles, with_best(table, "**{}**"))]
    if side := beside(target, methods, model):
        parts += ["## Beside the paper", markdown(side.columns, side.lines), *agreement_lines(side)]
    if target.pairs:
        write_text(folder / CLAIMS, markdown(*claims_table(target, folder, methods, table)) + "\n")
    if found:
        parts += [f"## Differences to {baseline}", f"{CAPTION}.", markdown(*difference_table(found))]
    write_text(folder / TABLE, "\n\n".join(part for part in parts if part) + "\n")


def claims_table(
    target: Target, folder: Path, methods: Mapping[str, Mapping], table: Table
) -> tuple[list[str], list[list[Any]]]:
    """Of each pair: both methods' perplexity, KL and bits, the difference of their losses, and whether the perplexity
    is lower; `?` where the difference may be chance."""
    columns = ["paper", "better", "than", "perplexity", "KL to fp16", "bits measured", "difference in loss", "holds"]
    shown = {title: table.column(title) for title in columns[3:6]}
    rows = []
    for paper, better, than in target.pairs:
        losses = differences(folder, {name: methods[name] for name in (better, than)}, than)[better]
        loss = next(one for name, one in losses.items() if name.endswith("loss"))
        both = [
            f"{one[better].value:.{digits}g} against {one[than].value:.{digits}g}"
            for one, digits in zip(shown.values(), (4, 3, 3), strict=True)
        ]
        verdict = ("yes" if loss.mean < 0 else "no") + ("" if loss.differs else "?")
        rows.append([paper, better, than, *both, _interval(loss), verdict])
    return columns, rows


CAPTION = "On the same samples, with 95 % confidence intervals; losses and KL in nats per token, scores in percent"


def agreement_table(agreements: list[Agreement]) -> tuple[list[str], list[list[Any]]]:
    """How many pairs of methods both rank alike, by column."""
    columns = ["paper's column", "kvq's column", "pairs ranked alike", "of equal bits alone"]
    rows = [
        [f"{one.model} {one.published}".strip(), one.measured, f"{one.same} of {one.pairs}"]
        + ["{} of {}".format(*one.same_bits)]
        for one in agreements
    ]
    return columns, rows


def agreement_lines(side: Beside) -> list[str]:
    """The agreement as Markdown."""
    return ["Pairs of compressed methods that the paper ranks, and how many kvq ranks alike:"] + [
        markdown(*agreement_table(side.agreements))
    ]


def difference_table(found: Mapping[str, Mapping[str, Difference]]) -> tuple[list[str], list[list[Any]]]:
    """One row per method; `-0.012 [-0.020, -0.004]` with a star where the interval leaves out zero."""
    names = list(dict.fromkeys(name for row in found.values() for name in row))
    return ["method", *names], [
        [label, *(_interval(row[name]) if name in row else None for name in names)] for label, row in found.items()
    ]


def _interval(one: Difference) -> str:
    if one.low is None:
        return f"{one.mean:+.4g}"
    return f"{one.mean:+.4g} [{one.low:+.4g}, {one.high:+.4g}]" + (" *" if one.differs else "")

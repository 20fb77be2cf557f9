"""Write docs/REPRODUCTION.md, the page of the papers' claims, from result files alone."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq_cli import __version__
from kvq_cli.evaluation.formats import markdown
from kvq_cli.papers.claims import FAILS, HARDWARE, HOLDS, NOT_MEASURED, Verdict, claims, judge
from kvq_cli.papers.run import DONE, state
from kvq_cli.papers.side_by_side import side_by_side
from kvq_cli.papers.targets import REFERENCE, ROOT, Target, target, targets

#: How many values of a list a cell shows.
MAX_SHOWN = 8
PAPERS = ("TemporalKV", "SQuat", "InnerQ", "XQuant")


def page_text(model: str, root: Path = ROOT) -> str:
    """Return the page as Markdown: claims with their measured numbers and verdicts, then targets with their states."""
    verdicts = [judge(claim, model, root) for claim in claims()]
    parts = [
        "# Reproduction",
        _introduction(model),
        "## What holds",
        markdown(["paper", "claims", HOLDS, FAILS, NOT_MEASURED, HARDWARE], _counts(verdicts)),
    ]
    failing = [verdict for verdict in verdicts if verdict.state == FAILS]
    if failing:
        parts += ["## What does not hold, and why", "\n".join(_reason(verdict) for verdict in failing)]
    for paper in PAPERS:
        rows = [_row(verdict) for verdict in verdicts if verdict.claim.paper == paper]
        parts += [f"## {paper}", markdown(["source", "claim", "command", "our numbers", "holds"], rows)]
    rankings = [row for each in targets().values() if (row := _ranking(each, model, root))]
    if rankings:
        columns = ["target", "pairs of methods that the paper ranks", "ranked alike here", "of those of equal bits"]
        parts += ["## Rankings beside the papers'", RANKINGS, markdown(columns, rankings)]
    parts += ["## Tables and figures", markdown(["target", "what", "state", "results"], _targets(model, root))]
    return "\n\n".join(parts) + "\n"


#: The paragraph above the table of rankings.
RANKINGS = (
    "All columns of a published table, each beside ours for it; on the built-in model RULER's mean stands for task "
    "scores, and its text for theirs. Pairs of equal bits are the hard ones: with more bits any method wins."
)


def _ranking(ranked: Target, model: str, root: Path) -> list[Any] | None:
    """The row of a finished target: how many pairs of methods it ranks as the paper does; None without such pairs."""
    if ranked.table is None or not ranked.rows(model) or state(ranked, model, root) != DONE:
        return None
    methods = json.loads(ranked.result(model, root).read_text(encoding="utf-8"))["methods"]
    compared = side_by_side(ranked, methods, model)
    if compared is None:
        return None
    columns = compared.agreements
    pairs, same = sum(column.pairs for column in columns), sum(column.same for column in columns)
    equal = [sum(column.same_bits[index] for column in columns) for index in (0, 1)]
    return [ranked.id, pairs, f"{same} ({_percent(same, pairs)})", f"{equal[0]} of {equal[1]} ({_percent(*equal)})"]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "none"


def _introduction(model: str) -> str:
    where = "the built-in model" if model == REFERENCE else model
    return (
        f"Made by `make reproduction` from the files below `{ROOT}`, with kvq {__version__} on {where}; no number here "
        "is typed by hand. Each claim is checked by an expression in `kvq_cli/papers/claims.yaml`; the papers' "
        "own numbers are in `kvq_cli/papers/published`. A claim about another model is checked here for its direction, "
        "on a model a thousand times smaller: that it fails here does not say that it fails there. `make list` shows "
        "what each target needs at the paper's sizes, and `make TARGET MODEL=...` makes it there."
    )


def _counts(verdicts: Sequence[Verdict]) -> list[list[Any]]:
    rows = []
    for paper in (*PAPERS, "all"):
        states = Counter(verdict.state for verdict in verdicts if paper in ("all", verdict.claim.paper))
        rows.append([paper, sum(states.values()), *(states[name] for name in (HOLDS, FAILS, NOT_MEASURED, HARDWARE))])
    return rows


def _reason(verdict: Verdict) -> str:
    claim = verdict.claim
    return f"- **{claim.paper}, {claim.source}**: {claim.claim} *Why*: {claim.why or 'not found yet'}."


def _row(verdict: Verdict) -> list[str]:
    claim = verdict.claim
    commands = "<br>".join("`make gpu`" if target(name).gpu else f"`make {name}`" for name in claim.targets)
    numbers = "<br>".join(f"{name}: {_formatted(value)}" for name, value in verdict.numbers.items())
    return [claim.source, claim.claim, commands or "`kvq methods`", numbers, verdict.state]


def _formatted(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_formatted(entry)}" for key, entry in list(value.items())[:MAX_SHOWN])
    if isinstance(value, (list, tuple)):
        more = f", ... ({len(value)})" if len(value) > MAX_SHOWN else ""
        return ", ".join(map(_formatted, value[:MAX_SHOWN])) + more
    return str(value)


def _targets(model: str, root: Path) -> list[list[str]]:
    return [_target(each, model, root) for each in targets().values()]


def _target(listed: Target, model: str, root: Path) -> list[str]:
    folder = listed.folder(model, root)
    shown = f"`{shlex.quote(str(folder))}`" if folder.is_dir() and listed.runs else ""
    return [listed.id, f"{listed.paper}: {listed.what}", state(listed, model, root), shown]

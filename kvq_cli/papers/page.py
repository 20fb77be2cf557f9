"""The page of the papers' claims, made of result files alone."""

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
from kvq_cli.papers.side_by_side import beside
from kvq_cli.papers.targets import REFERENCE, ROOT, Target, target, targets

#: Values that a cell shows of a longer list.
SHOWN = 8
PAPERS = ("TemporalKV", "SQuat", "InnerQ", "XQuant")


def page_text(model: str, root: Path = ROOT) -> str:
    """`docs/REPRODUCTION.md`: claims with our numbers and what holds, then the targets and how far each is."""
    verdicts = [judge(claim, model, root) for claim in claims()]
    parts = [
        "# Reproduction",
        _introduction(model),
        "## What holds",
        markdown(["paper", "claims", HOLDS, FAILS, NOT_MEASURED, HARDWARE], _counts(verdicts)),
    ]
    failing = [one for one in verdicts if one.state == FAILS]
    if failing:
        parts += ["## What does not hold, and why", "\n".join(_reason(one) for one in failing)]
    for paper in PAPERS:
        rows = [_row(one) for one in verdicts if one.claim.paper == paper]
        parts += [f"## {paper}", markdown(["source", "claim", "command", "our numbers", "holds"], rows)]
    rankings = [row for one in targets().values() if (row := _ranking(one, model, root))]
    if rankings:
        columns = ["target", "pairs of methods that the paper ranks", "ranked alike here", "of those of equal bits"]
        parts += ["## Rankings beside the papers'", RANKINGS, markdown(columns, rankings)]
    parts += ["## Tables and figures", markdown(["target", "what", "state", "results"], _targets(model, root))]
    return "\n\n".join(parts) + "\n"


#: What the table of rankings counts.
RANKINGS = (
    "All columns of a published table, each beside ours for it; on the built-in model RULER's mean stands for task "
    "scores, and its text for theirs. Pairs of equal bits are the hard ones: with more bits any method wins."
)


def _ranking(one: Target, model: str, root: Path) -> list[Any] | None:
    """How many pairs of methods a finished target ranks as the paper does."""
    if one.table is None or not one.rows(model) or state(one, model, root) != DONE:
        return None
    methods = json.loads(one.result(model, root).read_text(encoding="utf-8"))["methods"]
    side = beside(one, methods, model)
    if side is None:
        return None
    found = side.agreements
    pairs, same = sum(each.pairs for each in found), sum(each.same for each in found)
    equal = [sum(each.same_bits[index] for each in found) for index in (0, 1)]
    return [one.id, pairs, f"{same} ({_percent(same, pairs)})", f"{equal[0]} of {equal[1]} ({_percent(*equal)})"]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "none"


def _introduction(model: str) -> str:
    where = "the built-in model" if model == REFERENCE else model
    return (
        f"Made by `make reproduction` from the files below `{ROOT}`, with kvq {__version__} on {where}; no number here "
        "is typed by hand. Each claim is checked by an expression in `kvq_cli/papers/claims.yaml`; the papers' "
        "own numbers are in `kvq_cli/papers/published`. A claim about another model is checked here for its direction, on a "
        "model a thousand times smaller: that it fails here does not say that it fails there. `make list` shows what "
        "each target needs at the paper's sizes, and `make TARGET MODEL=...` makes it there."
    )


def _counts(verdicts: Sequence[Verdict]) -> list[list[Any]]:
    rows = []
    for paper in (*PAPERS, "all"):
        states = Counter(one.state for one in verdicts if paper in ("all", one.claim.paper))
        rows.append([paper, sum(states.values()), *(states[name] for name in (HOLDS, FAILS, NOT_MEASURED, HARDWARE))])
    return rows


def _reason(one: Verdict) -> str:
    return f"- **{one.claim.paper}, {one.claim.source}**: {one.claim.claim} *Why*: {one.claim.why or 'not found yet'}."


def _row(one: Verdict) -> list[str]:
    commands = "<br>".join("`make gpu`" if target(name).gpu else f"`make {name}`" for name in one.claim.targets)
    numbers = "<br>".join(f"{name}: {_shown(found)}" for name, found in one.numbers.items())
    return [one.claim.source, one.claim.claim, commands or "`kvq methods`", numbers, one.state]


def _shown(found: Any) -> str:
    if isinstance(found, bool):
        return "yes" if found else "no"
    if isinstance(found, float):
        return f"{found:.4g}"
    if isinstance(found, Mapping):
        return ", ".join(f"{key} {_shown(one)}" for key, one in list(found.items())[:SHOWN])
    if isinstance(found, (list, tuple)):
        return ", ".join(map(_shown, found[:SHOWN])) + (f", ... ({len(found)})" if len(found) > SHOWN else "")
    return str(found)


def _targets(model: str, root: Path) -> list[list[str]]:
    return [_target(one, model, root) for one in targets().values()]


def _target(one: Target, model: str, root: Path) -> list[str]:
    found = one.folder(model, root)
    place = f"`{shlex.quote(str(found))}`" if found.is_dir() and one.runs else ""
    return [one.id, f"{one.paper}: {one.what}", state(one, model, root), place]

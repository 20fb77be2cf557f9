"""Write docs/REPRODUCTION.md, the page of the papers' claims, from result files alone.

python -m lab.pages.reproduction [FILE [MODEL...]]    into FILE; of these models instead of the repository's two
"""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq_cli import __version__
from kvq_cli.evaluation.formats import markdown
from kvq_cli.evaluation.paired import interval
from kvq_cli.files import write_text
from kvq_cli.models import REFERENCE, SMOLLM2
from kvq_cli.papers.run import JUDGED, OLDER, state
from kvq_cli.papers.side_by_side import side_by_side
from kvq_cli.papers.targets import MEASURED, ROOT, Target, paper_data, target, targets
from lab.claims.claims import BY_CHANCE, FAILS, HARDWARE, HOLDS, NOT_MEASURED, Verdict, claims, explain, judge
from lab.claims.measured_on import measured_on
from lab.claims.settings import AtEqualBits, Effect, Sweep

#: How many values of a list a cell shows.
MAX_SHOWN = 4
PAPERS = ("TemporalKV", "SQuat", "InnerQ", "XQuant")
#: How the page names the models.
NAMES = {REFERENCE: "built-in model", SMOLLM2: "SmolLM2-135M"}


def page_text(models: Sequence[str], root: Path = ROOT) -> str:
    """Return the page as Markdown: claims with each model's numbers and verdicts, then targets with their states."""
    verdicts = {model: [judge(claim, model, root) for claim in claims()] for model in models}
    parts = [
        "# Reproduction",
        _introduction(models, root),
        "## What holds",
        markdown(["paper", "claims", "model", *STATES], _counts(verdicts)),
        VERDICTS,
    ]
    for model, judged in verdicts.items():
        if doubtful := [verdict for verdict in judged if verdict.state == BY_CHANCE]:
            reasons = "\n".join(_reason(verdict, model, root) for verdict in doubtful)
            parts += [f"## What may hold by chance: {_name(model)}", reasons]
    for model, judged in verdicts.items():
        if failing := [verdict for verdict in judged if verdict.state == FAILS]:
            reasons = "\n".join(_reason(verdict, model, root) for verdict in failing)
            parts += [f"## What does not hold, and why: {_name(model)}", reasons]
    columns = [column for model in models for column in (f"{_name(model)}: numbers", "holds")]
    for paper in PAPERS:
        rows = [_row(each) for each in zip(*verdicts.values(), strict=True) if each[0].claim.paper == paper]
        parts += [f"## {paper}", markdown(["source", "claim", "command", *columns], rows)]
    rankings = [row for model in models for each in targets().values() if (row := _ranking(each, model, root))]
    if rankings:
        columns = ["target", "model", "pairs of methods", "ranked alike", "of those of equal bits", "ties"]
        parts += ["## Rankings beside the papers'", RANKINGS, markdown(columns, rankings)]
    columns = ["target", "what", *map(_name, models)]
    parts += ["## Tables and figures", markdown(columns, [_target(each, models, root) for each in targets().values()])]
    columns = ["target", "the paper's data", *map(_name, models)]
    read = [each for each in targets().values() if each.paper in PAPERS and (each.eval or each.analyze)]
    scored = [_scored(each, models) for each in read]
    parts += ["## What stands for the papers' texts and tasks", SCORED, markdown(columns, scored)]
    return "\n\n".join(parts) + "\n"


def _name(model: str) -> str:
    return NAMES.get(model, model)


#: In the place of a reason.
UNKNOWN = "not found yet"
#: The columns of the table of counts.
STATES = (HOLDS, BY_CHANCE, FAILS, NOT_MEASURED, HARDWARE)
#: The paragraph below the table of counts.
VERDICTS = (
    "A verdict compares means over windows or answers. `holds?` marks checks that are true although the 95 % interval "
    "of a paired difference includes zero, or although a claim about methods of equal bits was measured at unequal "
    "ones. *Paired* lists these differences: loss and KL in nats per token, scores in points, a star where the "
    "interval excludes zero. *Measured* lists what other settings are worth: their KL and measured bits, and the "
    "change of KL at equal bits, from the line through the defaults at two numbers of bits, in windows of 1,024 tokens "
    "(short contexts) and with the bits of 32,768 tokens (long contexts). Calibrated methods also vary with the "
    "rounding of their calibration (COMPARISON.md says how much)."
)
#: The paragraph above the table of texts and tasks.
SCORED = (
    "Texts are excerpts in `examples/texts` (wikitext2, gsm8k, kjv), held-out Wikipedia prose (prose) and the topics "
    "of Python's documentation (pydoc); windows of the built-in model have 1,024 tokens. RULER's tasks stand for "
    "GSM8K, LongBench and the other tasks whose answers the papers score; [EVALUATION.md](EVALUATION.md) says which of "
    "them SmolLM2 answers."
)
#: The paragraph above the table of rankings.
RANKINGS = (
    "All columns of a published table, each beside ours for it; on the models here RULER's mean stands for task "
    "scores, and their texts for the paper's. Pairs of equal bits are the hard ones: with more bits any method wins. "
    "Pairs of methods that are measured equal, as at 1 bit where no needle is found, are ties and rank nothing. "
    "Columns of one table repeat the same measured pairs for several models of the paper."
)


def _ranking(ranked: Target, model: str, root: Path) -> list[Any] | None:
    """The row of a finished target: how many pairs of methods it ranks as the paper does; None without such pairs."""
    if ranked.table is None or not ranked.rows(model) or state(ranked, model, root) not in JUDGED:
        return None
    methods = json.loads(ranked.result(model, root).read_text(encoding="utf-8"))["methods"]
    compared = side_by_side(ranked, methods, model)
    if compared is None:
        return None
    columns = compared.agreements
    pairs, same = sum(column.pairs for column in columns), sum(column.same for column in columns)
    equal = [sum(column.same_bits[index] for column in columns) for index in (0, 1)]
    return [
        ranked.id,
        _name(model),
        pairs,
        f"{same} ({_percent(same, pairs)})",
        f"{equal[0]} of {equal[1]} ({_percent(*equal)})",
        sum(column.ties for column in columns),
    ]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f}%" if whole else "none"


def _introduction(models: Sequence[str], root: Path) -> str:
    on = " and ".join(f"the {NAMES[model]}" if model == REFERENCE else _name(model) for model in models)
    return (
        f"Generated by `make reproduction` from the files below `{ROOT}`, with kvq {__version__}, on {on}; no number "
        f"of a result file is typed by hand. {_of_earlier_versions(models, root)}Each claim is checked by "
        "an expression in `lab/claims/claims.yaml`; the papers' own numbers are in `kvq_cli/papers/published`. A "
        "claim about another model is checked here for its direction, on models fifty (SmolLM2-135M) and a thousand "
        "(built-in) times smaller: that it fails here does not say that it fails there. `make list` shows what each "
        "target needs at the paper's sizes, and `make TARGET MODEL=...` makes it there."
    )


def _of_earlier_versions(models: Sequence[str], root: Path) -> str:
    """A sentence on the results that an earlier version of calibration or evaluation made, if there are any."""
    states = [state(each, model, root) for model in models for each in targets().values() if each.runs]
    older, finished = states.count(OLDER), sum(each in JUDGED for each in states)
    if not older:
        return ""
    return (
        f"**{older} of the {finished} finished targets have numbers of an earlier version of calibration or "
        f"evaluation**: the table at the end of this page marks them `{OLDER}`, and `make TARGET MODEL=...` measures "
        "them again. "
    )


def _counts(verdicts: Mapping[str, Sequence[Verdict]]) -> list[list[Any]]:
    rows = []
    for paper in (*PAPERS, "all"):
        for model, judged in verdicts.items():
            states = Counter(verdict.state for verdict in judged if paper in ("all", verdict.claim.paper))
            counts = [states[name] for name in STATES]
            rows.append([paper, sum(states.values()), _name(model), *counts])
    return rows


def _reason(verdict: Verdict, model: str, root: Path) -> str:
    claim = verdict.claim
    word = "But" if verdict.state == BY_CHANCE else "Why"
    reason = explain(verdict, model, root) or UNKNOWN
    text = f"- **{claim.paper}, {claim.source}**: {claim.claim} *{word}*: {reason}."
    if verdict.differences:
        text += f" *Paired*: {'; '.join(f'{name} {interval(each)}' for name, each in verdict.differences.items())}."
    measured = [_setting(sweep, effect) for sweep, effect in claim.measured_reasons(model, root)]
    return f"{text} *Measured* ([SETTINGS.md](SETTINGS.md)): {'; '.join(measured)}." if measured else text


def _setting(sweep: Sweep, effect: Effect) -> str:
    """What an option's value is worth beside the default: bits, KL and the verdict at equal bits."""
    row, default = effect.measured, effect.default
    if effect.short.verdict == effect.long.verdict:
        found = _at_equal_bits(effect.judged)
    else:
        found = f"short contexts {_at_equal_bits(effect.short)}; long contexts {_at_equal_bits(effect.long)}"
    return (
        f"{sweep.method} `{row.change}`: KL {row.mean_kl:.3g} with {row.bits:.3g} bits, {default.mean_kl:.3g} with "
        f"{default.bits:.3g} by default ({found})"
    )


def _at_equal_bits(effect: AtEqualBits) -> str:
    mean, low, high = (f"{100 * value:+.0f}" for value in effect.relative)
    return f"{effect.verdict}: {mean} %, 95 %: {low} to {high}"


def _row(verdicts: Sequence[Verdict]) -> list[str]:
    """The row of one claim, with the verdict on each model."""
    claim = verdicts[0].claim
    commands = "<br>".join("`make gpu`" if target(name).gpu else f"`make {name}`" for name in claim.targets)
    results = [cell for verdict in verdicts for cell in (_numbers(verdict), verdict.state)]
    return [claim.source, claim.claim, commands or "`kvq methods`", *results]


def _numbers(verdict: Verdict) -> str:
    numbers = [f"{name}: {_formatted(value)}" for name, value in verdict.numbers.items()]
    return "<br>".join(numbers + [f"{name}: {interval(each)}" for name, each in verdict.differences.items()])


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


def _target(listed: Target, models: Sequence[str], root: Path) -> list[str]:
    return [listed.id, f"{listed.paper}: {listed.what}", *(_state(listed, model, root) for model in models)]


def _scored(listed: Target, models: Sequence[str]) -> list[str]:
    return [listed.id, paper_data(listed), *(measured_on(listed, model) for model in models)]


def _state(listed: Target, model: str, root: Path) -> str:
    """The target's state, with the folder of its results."""
    folder = listed.folder(model, root)
    shown = f": `{shlex.quote(str(folder))}`" if folder.is_dir() and listed.runs else ""
    return state(listed, model, root) + shown


if __name__ == "__main__":
    file, *models = sys.argv[1:] or ["docs/REPRODUCTION.md"]
    write_text(Path(file), page_text(models or MEASURED))

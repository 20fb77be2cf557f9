"""The papers' claims, each checked by an expression over result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from kvq_cli.evaluation.paired import Difference
from kvq_cli.models import REFERENCE
from kvq_cli.papers.targets import ROOT, target
from lab.claims.pairs import Pair
from lab.claims.results import MissingResult, Results
from lab.claims.settings import Effect, Sweep, load_sweep

HOLDS, FAILS, NOT_MEASURED, HARDWARE = "holds", "does not hold", "not measured", "needs hardware"
#: The check is true, but proves little: see `Claim.chance` and `Claim.paired`.
BY_CHANCE = "holds?"
#: Printed where claims.yaml gives no reason for a doubt, and in the place of a reason whose numbers are missing.
INTERVAL = "a paired interval includes zero"
NOT_READ = "the results that the reason quotes are not measured"


@dataclass(frozen=True)
class Claim:
    """A claim of a paper; the comment at the top of claims.yaml explains the fields."""

    paper: str
    source: str
    claim: str
    targets: Sequence[str]
    check: str = ""
    shown: str = ""
    sizes: str = "here"
    gpu: bool = False
    why: str | Mapping[str, str] = ""
    chance: Mapping[str, str] = field(default_factory=dict)
    paired: Sequence[Pair] = ()
    beside: Sequence[Pair] = ()
    tried: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def reason(self, model: str) -> str:
        """Why the claim does not hold on this model, numbers as expressions; empty where no reason is given."""
        if isinstance(self.why, str):
            return self.why if model == REFERENCE or self.sizes == "any" or self.gpu else ""
        return self.why.get(model, "")

    def measured_reasons(self, model: str, root: Path = ROOT) -> list[tuple[Sweep, Effect]]:
        """What other settings of the methods are worth on this model, as far as their sweeps were measured."""
        sweeps = {name: load_sweep(target(name), model, root) for name in self.tried}
        found = [
            (sweep, sweep.effect(change)) for name, sweep in sweeps.items() if sweep for change in self.tried[name]
        ]
        return [(sweep, effect) for sweep, effect in found if effect is not None]


@dataclass(frozen=True)
class Verdict:
    """Whether a claim holds. state: HOLDS, BY_CHANCE, FAILS, NOT_MEASURED or HARDWARE; numbers: every result that its
    check read, by name; differences: of the claim's pairs, by name, as far as their scores are here."""

    claim: Claim
    state: str
    numbers: Mapping[str, float | bool | Sequence[float]] = field(default_factory=dict)
    differences: Mapping[str, Difference] = field(default_factory=dict)


@cache
def claims() -> tuple[Claim, ...]:
    """All claims in the order of claims.yaml."""
    import yaml

    document = yaml.safe_load(Path(__file__).with_name("claims.yaml").read_text(encoding="utf-8"))
    return tuple(map(_claim, document["claims"]))


def _claim(entry: Mapping[str, Any]) -> Claim:
    pairs: dict[str, Any] = {
        name: [Pair(*pair) for pair in entry[name]] for name in ("paired", "beside") if name in entry
    }
    return Claim(**{**entry, **pairs})


def show(verdict: Verdict, model: str, root: Path = ROOT) -> str:
    """Return the number that a table prints beside the verdict; empty without one, or where it is not measured."""
    try:
        return Results(model, root).fill(verdict.claim.shown)
    except MissingResult:
        return ""


def explain(verdict: Verdict, model: str, root: Path = ROOT) -> str:
    """Explain why a claim fails or may hold by chance, with numbers from the results; empty without a reason."""
    claim = verdict.claim
    try:
        reason = claim.chance.get(model, INTERVAL) if verdict.state == BY_CHANCE else claim.reason(model)
        return Results(model, root).fill(reason)
    except MissingResult:
        return NOT_READ


def judge(claim: Claim, model: str, root: Path = ROOT) -> Verdict:
    """Whether a claim holds, according to a model's result files below `root`."""
    results = Results(model, root, named=len(claim.targets) > 1)
    try:
        holds = results.evaluate(claim.check)
    except MissingResult:
        return Verdict(claim, HARDWARE if claim.gpu else NOT_MEASURED, results.read)
    doubtful = model in claim.chance
    differences: dict[str, Difference] = {}
    for pair in (*claim.paired, *claim.beside):
        if (difference := pair.difference(model, root)) is not None:
            differences[pair.title(named=len(claim.targets) > 1)] = difference
            doubtful |= pair in claim.paired and not pair.favors(difference)
    return Verdict(claim, (BY_CHANCE if doubtful else HOLDS) if holds else FAILS, results.read, differences)

"""Effects of single options on KL divergence, beside the default and at equal measured bits, from sweeps' results."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq_cli.evaluation.paired import Difference, paired
from kvq_cli.evaluation.perplexity import PERPLEXITY
from kvq_cli.evaluation.plot import measured_bits
from kvq_cli.methods.registry import build_parsed, from_config, to_config
from kvq_cli.papers.report import WINDOWS
from kvq_cli.papers.run import RECORD
from kvq_cli.papers.targets import ROOT, Target

#: Verdicts on an option's value beside the default, at equal bits.
BETTER, WORSE, CHANCE, UNKNOWN = "better", "worse", "chance", "no equal bits"


@dataclass(frozen=True)
class Measured:
    """One row of a sweep. change: `option=value`, or `2 bits` for the defaults.

    bits:       measured per cached number, windows, scales and outliers included.
    kl:         KL to the uncompressed model of each window, nats per token.
    texts:      text -> (perplexity, KL), over its windows.
    method:     its options, as `registry.to_config` gives them.
    """

    change: str
    bits: float
    kl: Sequence[float]
    texts: Mapping[str, tuple[float, float]]
    perplexity: float
    method: Mapping[str, Any]

    @property
    def mean_kl(self) -> float:
        """Mean over all windows, nats per token."""
        return sum(self.kl) / len(self.kl)


@dataclass(frozen=True)
class Effect:
    """An option's value beside the default. Differences of KL are paired by window, in nats per token.

    difference: to the default.
    same_bits:  to the defaults at this row's measured bits, `defaults_at`; None outside of their bits.
    line_kl:    mean KL of the defaults at these bits.
    """

    measured: Measured
    default: Measured
    difference: Difference
    same_bits: Difference | None
    line_kl: float | None

    @property
    def judged(self) -> tuple[Difference, float] | None:
        """The difference that the verdict rests on, and the KL that it is relative to; None where no bits compare.

        At equal bits; outside of the defaults' bits the plain difference, if more bits do not explain it.
        """
        if self.same_bits is not None and self.line_kl is not None:
            return self.same_bits, self.line_kl
        fewer = self.measured.bits <= self.default.bits
        return (self.difference, self.default.mean_kl) if fewer == (self.difference.mean < 0) else None

    @property
    def verdict(self) -> str:
        """BETTER or WORSE only if the 95 % interval excludes zero; else CHANCE."""
        if self.judged is None:
            return UNKNOWN
        difference, _ = self.judged
        if not difference.differs:
            return CHANCE
        return BETTER if difference.mean < 0 else WORSE

    @property
    def relative(self) -> tuple[float, float, float]:
        """Mean, low and high of the judged difference as fractions of the KL that it is relative to."""
        if self.judged is None:
            raise ValueError(f"{self.measured.change}: no defaults at {self.measured.bits:g} bits")
        difference, kl = self.judged
        low, high = difference.low, difference.high
        return difference.mean / kl, (-math.inf if low is None else low / kl), (math.inf if high is None else high / kl)


@dataclass(frozen=True)
class Sweep:
    """What a target measured. defaults: at all its bits, the changed one first; missing: rows without a result."""

    target: Target
    defaults: Sequence[Measured]
    effects: Sequence[Effect]
    missing: Sequence[str]
    tokens: int
    shape: Mapping[str, Any]
    version: str

    @property
    def method(self) -> str:
        return self.target.sweep["method"] if self.target.sweep else ""

    @property
    def default(self) -> Measured:
        return self.defaults[0]

    def effect(self, change: str) -> Effect | None:
        """The effect of `option=value`, if it was measured."""
        return next((each for each in self.effects if each.measured.change == change), None)

    def better(self) -> list[Effect]:
        """Values that are better beyond chance, the greatest gain first."""
        return sorted((each for each in self.effects if each.verdict == BETTER), key=lambda each: each.relative[0])


def load_sweep(target: Target, model: str, root: Path = ROOT) -> Sweep | None:
    """The sweep that a finished target measured; None without results, or without those of the default."""
    folder = target.folder(model, root)
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        methods = json.loads(target.result(model, root).read_text(encoding="utf-8"))["methods"]
        windows = json.loads((folder / WINDOWS).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if not record["finished"]:
        return None
    labels = [(to_config(from_config(document["config"]["method"])), label) for label, document in methods.items()]
    rows, missing = [], []
    for change, text in target.rows(model).items():
        config = to_config(build_parsed(text))
        label = next((label for measured, label in labels if measured == config), None)
        if label is None:
            missing.append(change)
        else:
            rows.append(_measured(change, methods[label], windows[label], config))
    defaults = [row for row in rows if row.change.endswith(" bits")]
    if not defaults or defaults[0].change != next(iter(target.rows(model))):
        return None
    first = next(iter(methods.values()))
    return Sweep(
        target,
        defaults,
        [effect(row, defaults) for row in rows if row not in defaults],
        missing,
        max(cache["tokens"] for cache in first["cache"].values()),
        first["config"]["model_args"]["fingerprint"],
        record["kvq"],
    )


def effect(row: Measured, defaults: Sequence[Measured]) -> Effect:
    """The effect of a row beside the first of `defaults`, and beside all of them at the row's bits."""
    default = defaults[0]
    line = defaults_at(row.bits, defaults)
    return Effect(
        row,
        default,
        paired(row.kl, default.kl),
        None if line is None else paired(row.kl, line),
        None if line is None else sum(line) / len(line),
    )


def defaults_at(bits: float, defaults: Sequence[Measured]) -> list[float] | None:
    """KL of each window at `bits`: linear in log KL between the two defaults with the nearest measured bits.

    None if `bits` are fewer or more than those of all defaults.
    """
    points = sorted(defaults, key=lambda each: each.bits)
    for low, high in zip(points, points[1:], strict=False):
        if low.bits <= bits <= high.bits:
            share = (bits - low.bits) / (high.bits - low.bits) if high.bits > low.bits else 0.0
            return [
                math.exp((1 - share) * math.log(first) + share * math.log(second))
                for first, second in zip(low.kl, high.kl, strict=True)
            ]
    return None


def _measured(change: str, document: Mapping, windows: Mapping[str, Sequence[float]], config: Mapping) -> Measured:
    results = document["results"]
    texts = {
        name.removeprefix(f"{PERPLEXITY}_"): results[name] for name in results if name.startswith(f"{PERPLEXITY}_")
    }
    return Measured(
        change,
        measured_bits(document),
        [value for metric in sorted(windows) if metric.endswith(" KL") for value in windows[metric]],
        {name: (each["perplexity,none"], each["kl,none"]) for name, each in texts.items()},
        results[PERPLEXITY]["perplexity,none"],
        config,
    )

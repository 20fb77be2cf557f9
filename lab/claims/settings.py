"""Effects of single options on KL divergence, beside the default and at equal measured bits, from sweeps' results."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvq_cli.benchmarking.accounting import account
from kvq_cli.evaluation.base import PERPLEXITY
from kvq_cli.evaluation.paired import Difference, paired
from kvq_cli.evaluation.plot import measured_bits
from kvq_cli.methods.base import ModelShape
from kvq_cli.methods.registry import build_parsed, from_config, to_config
from kvq_cli.papers.run import JUDGED, state
from kvq_cli.papers.scores import read_scores
from kvq_cli.papers.targets import ROOT, Target

#: Verdicts on a setting beside the default.
BETTER, WORSE, SAVES, CHANCE = "better", "worse", "saves bits", "not significant"
#: A context in which sinks and recent tokens are a small part of the cache.
LONG = 32768
#: Differences of bits that do not count: a window of a few tokens more in a long context.
ROUNDING = 0.005
#: KL in nats per token below which float32 logits tell nothing.
SMALLEST = 1e-9
_SHAPE = ("layers", "query_heads", "kv_heads", "head_dim", "hidden_size")


@dataclass(frozen=True)
class Measured:
    """One row of a sweep. change: `option=value`, several joined by `:`, or `2 bits` for the defaults.

    bits:       measured per cached number, windows, scales and outliers included.
    long_bits:  the same, counted for a context of LONG tokens.
    kl:         KL to the uncompressed model of each window, nats per token.
    texts:      text -> (perplexity, KL), over its windows.
    """

    change: str
    bits: float
    long_bits: float
    kl: Sequence[float]
    texts: Mapping[str, tuple[float, float]]
    perplexity: float

    @property
    def mean_kl(self) -> float:
        """Mean over all windows, nats per token."""
        return sum(self.kl) / len(self.kl)


@dataclass(frozen=True)
class AtEqualBits:
    """A setting's KL beside the default's at equal bits of one context length; `at_equal_bits` says how.

    more:         bits more than the default's.
    difference:   of ln KL, paired by window.
    verdict:      BETTER: lower KL with no more bits, or lower than more bits by default would have. SAVES: higher KL,
                  but lower than fewer bits by default would have. WORSE: higher KL. CHANCE: the 95 % interval
                  contains 0.
    extrapolated: whether it is compared with the defaults at bits beyond those that they were measured at.
    """

    more: float
    difference: Difference
    verdict: str
    extrapolated: bool = False

    @property
    def relative(self) -> tuple[float, float, float]:
        """KL beside the default's, less 1: geometric mean over the windows, low and high end of the 95 % interval."""
        low, high = self.difference.low, self.difference.high
        return (
            math.expm1(self.difference.mean),
            -1.0 if low is None else math.expm1(low),
            math.inf if high is None else math.expm1(high),
        )


@dataclass(frozen=True)
class Effect:
    """A setting beside the default. difference: of KL, paired by window, in nats per token; short, long: at equal bits
    of the measured windows, and of LONG tokens with the same KL."""

    measured: Measured
    default: Measured
    difference: Difference
    short: AtEqualBits
    long: AtEqualBits

    @property
    def better(self) -> bool:
        """Whether the setting is better in long contexts, where its windows cost few bits, or in all."""
        return self.long.verdict == BETTER

    @property
    def long_only(self) -> bool:
        """Whether it is better in long contexts alone."""
        return self.better and self.short.verdict != BETTER

    @property
    def verdict(self) -> str:
        """The verdict where it is the same in both contexts; else those that are not CHANCE, and where they hold."""
        if self.short.verdict == self.long.verdict:
            return self.short.verdict
        places = (("short", self.short), ("long", self.long))
        return ", ".join(f"{each.verdict} in {name} contexts" for name, each in places if each.verdict != CHANCE)

    @property
    def judged(self) -> AtEqualBits:
        """The comparison to quote: the long one where only that is better, else the less favorable one."""
        return self.long if self.long_only else max(self.short, self.long, key=lambda each: each.relative[0])


@dataclass(frozen=True)
class Sweep:
    """What a target measured. defaults: at all its bits, the changed one first; missing: rows without a result."""

    target: Target
    defaults: Sequence[Measured]
    effects: Sequence[Effect]
    missing: Sequence[str]
    tokens: int

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
        """Settings that are better beyond chance, in all contexts before those in long ones, then by their gain."""
        found = [each for each in self.effects if each.better]
        return sorted(found, key=lambda each: (each.long_only, each.judged.relative[0]))


def load_sweep(target: Target, model: str, root: Path = ROOT) -> Sweep | None:
    """The sweep that a finished target measured; None without the results of its defaults, or if these were made with
    other options, inputs or artifacts than the target's."""
    if state(target, model, root) not in JUDGED:
        return None
    windows = read_scores(target.folder(model, root))
    if windows is None:
        return None
    methods = json.loads(target.result(model, root).read_text(encoding="utf-8"))["methods"]
    labels = [(to_config(from_config(document["config"]["method"])), label) for label, document in methods.items()]
    rows, missing = [], []
    for change, text in target.rows(model).items():
        config = to_config(build_parsed(text))
        label = next((label for measured, label in labels if measured == config), None)
        if label is None:
            missing.append(change)
        else:
            rows.append(_measured(change, methods[label], windows[label]))
    defaults = [row for row in rows if "=" not in row.change]
    if any("=" not in row for row in missing):
        return None
    return Sweep(
        target,
        defaults,
        [effect(row, defaults) for row in rows if row not in defaults],
        missing,
        next(iter(methods.values()))["config"]["settings"]["seqlens"][0],
    )


def effect(row: Measured, defaults: Sequence[Measured]) -> Effect:
    """The effect of a row beside the first of `defaults`, at the row's bits."""
    short = at_equal_bits(row.kl, row.bits, [(each.bits, each.kl) for each in defaults])
    long = at_equal_bits(row.kl, row.long_bits, [(each.long_bits, each.kl) for each in defaults])
    return Effect(row, defaults[0], paired(row.kl, defaults[0].kl), short, long)


def at_equal_bits(kl: Sequence[float], bits: float, defaults: Sequence[tuple[float, Sequence[float]]]) -> AtEqualBits:
    """The windows' KL beside that of the first default or, at other bits, beside that of the defaults at `bits`.

    defaults: (bits, KL of each window), the one that is changed first, at least two. ln KL is linear between two of
    them, and beyond them. A lower KL with no more bits is compared with the default itself, to the default's advantage.
    BETTER also takes a difference of KL to the default (in nats) whose interval excludes zero.
    """
    kl, defaults = _measurable(kl), [(each, _measurable(values)) for each, values in defaults]
    more, default = bits - defaults[0][0], defaults[0][1]
    plain, logs = paired(kl, default), [math.log(each) for each in kl]
    extrapolated = False
    if abs(more) <= ROUNDING or (more < 0 and plain.mean < 0):
        difference = paired(logs, [math.log(each) for each in default])
    else:
        measured = [each for each, _ in defaults]
        extrapolated = not min(measured) - ROUNDING <= bits <= max(measured) + ROUNDING
        difference = paired(logs, _line(bits, defaults))
    if not difference.differs:
        verdict = CHANCE
    elif difference.mean > 0:
        verdict = WORSE
    elif plain.mean < 0:
        verdict = BETTER if plain.differs else CHANCE
    else:
        verdict = SAVES
    return AtEqualBits(more, difference, verdict, extrapolated)


def _measurable(kl: Sequence[float]) -> list[float]:
    """KL of each window, at least `SMALLEST`: rounding can make it zero or negative, which has no logarithm."""
    return [max(each, SMALLEST) for each in kl]


def _line(bits: float, defaults: Sequence[tuple[float, Sequence[float]]]) -> list[float]:
    """ln KL of each window on the line through two neighboring defaults, at `bits`."""
    segments = list(itertools.pairwise(sorted(defaults, key=lambda each: each[0])))
    (low, first), (high, second) = next((each for each in segments if bits <= each[1][0]), segments[-1])
    share = (bits - low) / (high - low)
    return [(1 - share) * math.log(a) + share * math.log(b) for a, b in zip(first, second, strict=True)]


def _measured(change: str, document: Mapping, windows: Mapping[str, Sequence[float]]) -> Measured:
    results = document["results"]
    names = [name for name in results if name.startswith(f"{PERPLEXITY}_")]
    return Measured(
        change,
        measured_bits(document),
        _long_bits(document),
        [value for metric in sorted(windows) if metric.endswith(" KL") for value in windows[metric]],
        {
            name.removeprefix(f"{PERPLEXITY}_"): (results[name]["perplexity,none"], results[name]["kl,none"])
            for name in names
        },
        results[PERPLEXITY]["perplexity,none"],
    )


def _long_bits(document: Mapping) -> float:
    """Measured bits per cached number of a context of LONG tokens, as counted for the document's model."""
    model = document["config"]["model_args"]
    shape = {key: model["fingerprint"][key] for key in _SHAPE}
    return account(
        from_config(document["config"]["method"]), ModelShape(**shape, dtype=model["dtype"]), LONG
    ).measured_bits

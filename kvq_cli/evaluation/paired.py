"""Differences between methods on the same samples: their mean, and a 95 % confidence interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.evaluation.base import mean_and_error
from kvq_cli.evaluation.results import read_records

CONFIDENCE = 0.95
CAPTION = "On the same samples, with 95 % confidence intervals; losses and KL in nats per token, scores in percent"


@dataclass(frozen=True)
class Difference:
    """A method's mean less the baseline's, over `samples` samples that both answered.

    low, high: the interval that holds the difference with 95 % confidence (Student's t); None for a single sample.
    """

    mean: float
    low: float | None
    high: float | None
    samples: int

    @property
    def differs(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low is not None and (self.low > 0 or self.high < 0)


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Of `first` less `second`, sample by sample."""
    mean, error = mean_and_error([a - b for a, b in zip(first, second, strict=True)])
    if error is None:
        return Difference(mean, None, None, len(first))
    half = student(len(first) - 1) * error
    return Difference(mean, mean - half, mean + half, len(first))


def student(freedom: int, confidence: float = CONFIDENCE) -> float:
    """The t that a t-distributed number of `freedom` degrees exceeds in size with probability 1 - `confidence`."""
    try:
        from scipy.stats import t
    except ImportError:
        raise KvqError(
            "confidence intervals need the package scipy, which is not installed: pip install 'kvq-cli[eval]'"
        ) from None
    return float(t.ppf((1 + confidence) / 2, freedom))


def differences(folder: Path, methods: Mapping[str, Mapping], baseline: str) -> dict[str, dict[str, Difference]]:
    """By label and figure (`vt-512`, `perplexity-1024 loss`, `perplexity-1024 KL`): the method less the baseline.

    folder: what `kvq eval` wrote to; baseline: a label, or the start of a single one. Losses and KL divergences are in
    nats per token, scores in percent. KvqError where the samples are gone.
    """
    base = match(baseline, methods)
    scores = {label: _scores(folder, one) for label, one in methods.items()}
    return {
        label: {
            name: _common(found, scores[base][name])
            for name, found in scores[label].items()
            if scores[base].get(name, {}).keys() & found.keys()
        }
        for label in methods
        if label != base
    }


def difference_table(
    by_method: Mapping[str, Mapping[str, Difference]],
) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of a table of `differences`: one row per method, cells as `interval` formats them."""
    names = list(dict.fromkeys(name for row in by_method.values() for name in row))
    return ["method", *names], [
        [label, *(interval(row[name]) if name in row else None for name in names)] for label, row in by_method.items()
    ]


def interval(difference: Difference) -> str:
    """`-0.012 [-0.020, -0.004] *`: the mean, its interval, and a star if the interval leaves out zero."""
    if difference.low is None:
        return f"{difference.mean:+.4g}"
    low, high = f"{difference.low:+.4g}", f"{difference.high:+.4g}"
    return f"{difference.mean:+.4g} [{low}, {high}]" + (" *" if difference.differs else "")


def match(baseline: str, methods: Mapping[str, Any]) -> str:
    """The label that `baseline` names; UsageError where it is none or several."""
    found = [label for label in methods if label.startswith(baseline)]
    if baseline in methods:
        return baseline
    if len(found) != 1:
        raise UsageError(f"--baseline {baseline}: must name one of {', '.join(found or methods)}")
    return found[0]


def _common(first: Mapping[int, float], second: Mapping[int, float]) -> Difference:
    both = sorted(first.keys() & second.keys())
    return paired([first[index] for index in both], [second[index] for index in both])


def _scores(folder: Path, document: Mapping[str, Any]) -> dict[str, dict[int, float]]:
    """By figure and sample: what the method reached."""
    found: dict[str, dict[int, float]] = {}
    for name, place in document["samples"].items():
        try:
            records = read_records(folder / place)
        except OSError as error:
            raise KvqError(f"{folder / place}: {error.strerror}; run the evaluation again to compare samples") from None
        # Of a log that another run made longer, those of this run.
        for index in sorted(records)[: document["n-samples"][_task(name)]["effective"]]:
            for figure, value in _figures(name, records[index]).items():
                found.setdefault(figure, {})[index] = value
    return found


def _task(evaluation: str) -> str:
    return evaluation.rpartition("-")[0] or evaluation


def _figures(name: str, record: Mapping[str, Any]) -> dict[str, float]:
    if "nll" in record:
        tokens = record["tokens"]
        return {f"{name} loss": record["nll"] / tokens, f"{name} KL": record["kl"] / tokens}
    scores = {f"{name} {metric}": value for metric, value in record.get("scores", {}).items()}  # lm-eval's
    return {
        figure: 100 * value
        for figure, value in (scores or {name: record.get("score")}).items()
        if isinstance(value, (int, float))
    }

"""Paired differences between methods on the same samples, with 95 % confidence intervals."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvq_cli.errors import KvqError, UsageError, reading
from kvq_cli.evaluation.base import PERPLEXITY, mean_and_stderr
from kvq_cli.evaluation.sample_log import read_records
from kvq_cli.evaluation.tabulate import is_fraction
from kvq_cli.extras import install_command

CONFIDENCE = 0.95
MARKS = "* where the interval excludes zero, † where that holds for all methods together (Holm)"
CAPTION = "On the same samples, with 95 % confidence intervals; losses and KL in nats per token, scores in percent"


@dataclass(frozen=True)
class Difference:
    """Mean difference between a method and the baseline over the `samples` samples that both have.

    low, high: 95 % confidence interval (Student's t); None for a single sample. p: of the paired t-test, two-sided.
    holm: p corrected for the number of methods that one metric compares with the baseline (Holm, 1979); None for one.
    """

    mean: float
    low: float | None
    high: float | None
    samples: int
    p: float | None = None
    holm: float | None = None

    @property
    def differs(self) -> bool:
        """Whether the confidence interval excludes zero. Of few samples that all differ alike, whose interval has no
        width, the sign test decides."""
        if self.low is None or self.high is None or (self.p is not None and self.p >= 1 - CONFIDENCE):
            return False
        return self.low > 0 or self.high < 0

    @property
    def mark(self) -> str:
        """`†` if the methods differ also after Holm's correction, `*` if the interval alone excludes zero."""
        if self.holm is not None and self.holm < 1 - CONFIDENCE:
            return "†"
        return "*" if self.differs else ""


def paired(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Mean of `first` - `second`, sample by sample, with its confidence interval."""
    mean, error = mean_and_stderr([a - b for a, b in zip(first, second, strict=True)])
    if error is None:
        return Difference(mean, None, None, len(first))
    freedom = len(first) - 1
    half = student_t(freedom) * error
    return Difference(mean, mean - half, mean + half, len(first), _p_value(mean, error, freedom))


def _p_value(mean: float, error: float, degrees_of_freedom: int) -> float:
    from scipy.stats import t

    if error == 0:
        return 1.0 if mean == 0 else 2.0**-degrees_of_freedom  # sign test: all n samples differ to one side
    return float(2 * t.sf(abs(mean) / error, degrees_of_freedom))


def with_holm(differences: Mapping[str, Difference]) -> dict[str, Difference]:
    """Return one metric's differences of several methods to one baseline with p corrected for their number.

    The smallest p is multiplied by the number of methods, the next by one less, and so on; none falls below the one
    before it. With one method, or without p, they are as they were.
    """
    tested = sorted((one.p, label) for label, one in differences.items() if one.p is not None)
    corrected, least = dict(differences), 0.0
    for rank, (p, label) in enumerate(tested if len(tested) > 1 else []):
        least = max(least, min(1.0, (len(tested) - rank) * p))
        corrected[label] = replace(differences[label], holm=least)
    return corrected


def student_t(degrees_of_freedom: int, confidence: float = CONFIDENCE) -> float:
    """Two-sided critical value of Student's t distribution: P(|t| > value) = 1 - `confidence`. Needs scipy."""
    try:
        from scipy.stats import t
    except ImportError:
        raise KvqError(
            f"confidence intervals need the package scipy, which is not installed: {install_command('eval')}"
        ) from None
    return float(t.ppf((1 + confidence) / 2, degrees_of_freedom))


def differences(folder: Path, methods: Mapping[str, Mapping], baseline: str) -> dict[str, dict[str, Difference]]:
    """Differences to the baseline, by label and metric (`vt-512`, `perplexity-1024 loss`, `perplexity-1024 KL`).

    Of several texts: those of each, `perplexity_NAME-1024 loss`, and over all their windows, `perplexity loss`.

    folder: results folder of `kvq eval`; methods: its documents by label; baseline: a label, or a unique prefix of one.
    Losses and KL divergences are in nats per token, scores in the unit of the table, mostly percent. KvqError if the
    sample files are missing.
    """
    base = match_label(baseline, methods)
    scores = {label: sample_scores(folder, methods, label) for label in methods}
    found: dict[str, dict[str, Difference]] = {label: {} for label in methods if label != base}
    for name in dict.fromkeys(name for label in found for name in scores[label]):
        of_metric = {
            label: common_samples(scores[label][name], scores[base][name])
            for label in found
            if scores[label].get(name, {}).keys() & scores[base].get(name, {}).keys()
        }
        for label, difference in with_holm(of_metric).items():
            found[label][name] = difference
    return found


def difference_table(
    by_method: Mapping[str, Mapping[str, Difference]],
) -> tuple[list[str], list[list[Any]]]:
    """Columns and rows of a table of `differences`: one row per method, cells formatted by `interval`."""
    names = list(dict.fromkeys(name for row in by_method.values() for name in row))
    return ["method", *names], [
        [label, *(interval(row[name]) if name in row else None for name in names)] for label, row in by_method.items()
    ]


def interval(difference: Difference) -> str:
    """Format as `-0.012 [-0.020, -0.004] *`: mean, confidence interval, mark."""
    if difference.low is None or difference.high is None:
        return f"{difference.mean:+.4g}"
    low, high = f"{difference.low:+.4g}", f"{difference.high:+.4g}"
    return f"{difference.mean:+.4g} [{low}, {high}] {difference.mark}".rstrip()


def match_label(baseline: str, methods: Mapping[str, Any]) -> str:
    """The label that `baseline` equals or is the unique prefix of; UsageError if there is none or several."""
    matches = [label for label in methods if label.startswith(baseline)]
    if baseline in methods:
        return baseline
    if len(matches) != 1:
        raise UsageError(f"--baseline {baseline}: must name one of {', '.join(matches or methods)}")
    return matches[0]


def common_samples(first: Mapping[Hashable, float], second: Mapping[Hashable, float]) -> Difference:
    """Mean of `first` - `second`, scores by sample, over the samples that both have."""
    both = [sample for sample in first if sample in second]
    return paired([first[index] for index in both], [second[index] for index in both])


def sample_scores(folder: Path, methods: Mapping[str, Mapping], label: str) -> dict[str, dict[Hashable, float]]:
    """Scores of one of the methods by metric and sample: losses and KL in nats per token, fractions in percent.

    methods: documents by label, which tell together whether a metric is a fraction. Samples are numbers, or
    (evaluation, number) in the metrics of several texts together: `perplexity loss`.
    """
    scores: dict[str, dict[Hashable, float]] = {}
    document = methods[label]
    for name, path in document.get("samples", {}).items():
        task = _task(name)
        if task not in document["n-samples"]:
            continue
        results = document["results"].get(task, {})
        fractions = {metric for metric in results if is_fraction(methods.values(), task, metric)}
        try:
            records = read_records(folder / path, count := document["n-samples"][task]["effective"])
        except OSError as error:
            raise KvqError(f"{folder / path}: {error.strerror}; run the evaluation again to compare samples") from None
        # A run with a larger limit may have added samples to the same log: ignore them.
        for index in sorted(records)[:count]:
            with reading(f"{folder / path}: sample {index}", "run the evaluation again with --fresh"):
                sample = _sample_scores(name, records[index], fractions)
            for metric, value in sample.items():
                scores.setdefault(metric, {})[index] = value
                if name.startswith(f"{PERPLEXITY}_"):
                    pooled = f"{PERPLEXITY} {metric.rpartition(' ')[2]}"
                    scores.setdefault(pooled, {})[name, index] = value
    return scores


def _task(evaluation: str) -> str:
    return evaluation.rpartition("-")[0] or evaluation


def _sample_scores(name: str, record: Mapping[str, Any], fractions: Collection[str]) -> dict[str, float]:
    if "nll" in record:
        tokens = record["tokens"]
        return {f"{name} loss": record["nll"] / tokens, f"{name} KL": record["kl"] / tokens}
    if "parts" in record:  # drift
        parts = {"first": record["parts"][0], "last": record["parts"][-1]}
        tokens = sum(part["tokens"] for part in record["parts"])
        return {
            f"{name} KL": sum(part["kl"] for part in record["parts"]) / tokens,
            **{f"{name} KL {place} eighth": part["kl"] / part["tokens"] for place, part in parts.items()},
            f"{name} greedy tokens alike": record["agreement"],
        }
    scores = {metric: (f"{name} {metric}", value) for metric, value in record.get("scores", {}).items()}
    if not scores:  # a task of RULER, whose metric is named by the length
        scores = {f"{name.rpartition('-')[2]},none": (name, record.get("score"))}
    return {
        title: 100 * value if metric in fractions else value
        for metric, (title, value) in scores.items()
        if isinstance(value, (int, float))
    }

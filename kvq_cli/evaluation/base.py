"""What an evaluation is: samples that several subjects are run on, a record of each, and numbers made of these."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvq_cli.artifact import Artifact
    from kvq_cli.attention.attach import Attached
    from kvq_cli.cache.report import CacheReport
    from kvq_cli.methods.base import Method
    from kvq_cli.models import LoadedModel

Record = dict[str, Any]
"""The result of one sample: `index`, what was measured, and `cache` as `cache_record` makes it."""


@dataclass(frozen=True)
class Subject:
    """One method under test. label: its name beside the others of a run; folder: the one of its results, which is its
    own whatever it is compared with. chosen: what `attach` takes; identity: what its results depend on, as plain
    values."""

    label: str
    folder: str
    method: Method
    chosen: Method | Artifact
    identity: Mapping[str, Any]


class Evaluation(ABC):
    """One task at one length. Samples are numbered from 0; `count` of them are evaluated.

    task:   the task's name; length: its context length or window, in tokens.
    config: parameters of the task, for the result file and (with the subject's identity) for the resume key.
    version: raised when the task's samples or scores change, so that old numbers are not compared with new ones.
    higher_is_better: by metric, where the task itself says so.
    group:  the name that several tasks were asked for under: their mean is a figure, too; weighted: whether that mean
            counts samples, not tasks.
    alike:  whether all samples are about as long as each other: where one has nothing compressed, none has.
    """

    task: str
    length: int
    count: int
    available: int | None
    config: Mapping[str, Any]
    version: Any = 1
    higher_is_better: Mapping[str, bool] = MappingProxyType({})
    group: str | None = None
    weighted: bool = False
    alike: bool = True

    @property
    def name(self) -> str:
        return f"{self.task}-{self.length}"

    @abstractmethod
    def run(
        self, loaded: LoadedModel, attached: Mapping[str, Attached], pending: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[str, list[Record]]]:
        """Evaluate the pending samples (by label) under the methods attached (by label); yield records as they come."""

    @abstractmethod
    def metrics(self, records: Sequence[Record]) -> dict[str, float | None]:
        """`{"metric,none": value, "metric_stderr,none": error}` of all records."""


def cache_record(report: CacheReport, rows: int) -> dict[str, Any]:
    """What a record keeps of a cache's report: means per sequence of a batch of `rows`."""
    return {
        "tokens": report.tokens / rows,
        "compressed": report.compressed / rows,
        "bytes": report.bytes / rows,
        "fp16_bytes": report.fp16_bytes / rows,
        "constant_bytes": report.constant_bytes,
        "nominal_bits": report.nominal_bits,
        "packed_bits": report.packed_bits,
    }


def cache_summary(records: Sequence[Record]) -> dict[str, float]:
    """Nominal bits, bits of packed numbers, bits of all cached numbers, windows included; bytes of a sequence (mean).

    Constants (codebooks) are shared by all sequences: they are counted apart.
    """
    kept = [record["cache"] for record in records]
    held, plain = sum(one["bytes"] for one in kept), sum(one["fp16_bytes"] for one in kept)
    return {
        "nominal_bits": kept[0]["nominal_bits"],
        "packed_bits": sum(one["packed_bits"] for one in kept) / len(kept),
        "measured_bits": 16 * held / plain,
        "bytes": held / len(kept),
        "fp16_bytes": plain / len(kept),
        "ratio": plain / held,
        "constant_bytes": kept[0]["constant_bytes"],
        "tokens": sum(one["tokens"] for one in kept) / len(kept),
        "compressed_tokens": sum(one["compressed"] for one in kept) / len(kept),
    }


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and its standard error (None for a single value)."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, sqrt(variance / len(values))

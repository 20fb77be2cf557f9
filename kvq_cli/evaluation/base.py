"""Interface of an evaluation: numbered samples, one record per sample and method, metrics over all records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from kvq_cli.errors import NotFiniteError

if TYPE_CHECKING:
    from kvq_cli.artifact import Artifact
    from kvq_cli.attention.attach import Attached
    from kvq_cli.cache.report import CacheReport
    from kvq_cli.methods.base import Method
    from kvq_cli.models import LoadedModel

BATCH_TOKENS, MAX_BATCH = 8192, 16
"""Prompt tokens and prompts per batch, at most, if no batch size is given."""

PERPLEXITY = "perplexity"
"""Name of the task of perplexity and KL divergence."""

DRIFT = "drift"
"""Name of the task of divergence over a long answer."""

Tracker = Callable[[str, int, int], Callable[[int], None]]
"""`(description, total samples, samples already done)` -> callback with the number of newly finished samples."""

Record = dict[str, Any]
"""Result of one sample: `index`, its scores, and `cache` (see `cache_record`)."""


@dataclass(frozen=True)
class ComparedMethod:
    """One method of a comparison.

    label:      name in tables, unique within a run, like `kivi-2bit`.
    folder:     name of its result folder, which does not depend on the other methods of the run.
    attachable: the method, or its calibrated artifact, as passed to `attach`.
    identity:   method config and artifact digest as plain values: part of the resume key.
    """

    label: str
    folder: str
    method: Method
    attachable: Method | Artifact
    identity: Mapping[str, Any]


@dataclass(frozen=True)
class Work:
    """Tokens of a sample, for estimates of time. prompt: read in passes; scored: those of them with logits, which the
    uncompressed model computes, too; decoded: generated one by one, at most."""

    prompt: int
    scored: int = 0
    decoded: int = 0


class Evaluation(ABC):
    """One task at one length. Samples are numbered from 0; the first `count` are evaluated.

    task:             name of the task.
    length:           context length or window in tokens.
    available:        samples that the task has; None if they are generated without end.
    config:           task parameters, for the result file and (with the method's identity) for the resume key.
    resume_key:       what samples depend on beside `config`: part of the resume key alone.
    required:         fields that a sample's record must have to count as finished.
    version:          raised when samples or scores change, so that old and new numbers are not compared.
    higher_is_better: by metric, where the task defines it.
    groups:           names under which several tasks were requested, whose means are reported, too; True: the mean
                      weights tasks by their number of samples (lm-eval's `weight_by_size`).
    unread:           options that were given and that the task does not read, by flag: why.
    equal_lengths:    all samples have about the same length: if one is not compressed at all, none is.
    batch_size:       samples of a method that `run` evaluates together.
    methods_at_once:  methods of a unit, at most; None: all, where they share the prefill of a prompt.
    work:             tokens of a sample, on average.
    """

    task: str
    length: int
    count: int
    available: int | None
    config: Mapping[str, Any]
    resume_key: Mapping[str, Any] = MappingProxyType({})
    required: Collection[str] = ()
    version: Any = 1
    higher_is_better: Mapping[str, bool] = MappingProxyType({})
    groups: Mapping[str, bool] = MappingProxyType({})
    unread: Mapping[str, str] = MappingProxyType({})
    equal_lengths: bool = True
    batch_size: int = 1
    methods_at_once: int | None = None
    work: Work

    @property
    def name(self) -> str:
        return f"{self.task}-{self.length}"

    def units(self, pending: Mapping[str, Sequence[int]]) -> Iterator[dict[str, list[int]]]:
        """Split pending samples into the smallest parts for `run`: a batch of `methods_at_once` methods.

        Batches begin at multiples of `batch_size`: equal runs at the same time form equal batches. Units of one batch
        follow each other. Those of the last batch have one method each, unless methods need each other's prefill: no
        worker then waits long for another one's last methods.
        """
        batches = sorted({index // self.batch_size for index in set().union(*pending.values())})
        for batch in batches:
            unit = {
                label: [index for index in indices if index // self.batch_size == batch]
                for label, indices in pending.items()
            }
            left = [label for label, indices in unit.items() if indices]
            step = len(left)
            if self.methods_at_once:
                step = 1 if batch == batches[-1] else self.methods_at_once
            for first in range(0, len(left), step):
                yield {label: unit[label] for label in left[first : first + step]}

    def forget(self) -> None:  # noqa: B027 (most keep nothing)
        """Free what `run` has kept for further units of the same batch."""

    @abstractmethod
    def run(
        self, loaded: LoadedModel, attached: Mapping[str, Attached], pending: Mapping[str, Sequence[int]]
    ) -> Iterator[tuple[str, list[Record]]]:
        """Evaluate the pending samples of each label's method; yield `(label, records)` as they are finished."""

    @abstractmethod
    def metrics(self, records: Sequence[Record]) -> dict[str, float | None]:
        """`{"metric,none": value, "metric_stderr,none": error}` over all records."""


def default_batch_size(prompt_tokens: int) -> int:
    """Prompts of so many tokens in a batch if no batch size is given."""
    return max(1, min(MAX_BATCH, BATCH_TOKENS // max(1, prompt_tokens)))


@contextmanager
def named_failure(label: str) -> Iterator[None]:
    """A NotFiniteError that leaves the block names the method."""
    try:
        yield
    except NotFiniteError as error:
        error.method = label
        raise


def cache_record(report: CacheReport, rows: int) -> dict[str, float]:
    """Bits and bytes of a cache for a sample's record; counts are means over the batch's `rows` sequences.

    Room for later tokens counts apart: its size depends on the longest answer allowed and on the backend.
    """
    return {
        "tokens": report.tokens / rows,
        "compressed": report.compressed / rows,
        "bytes": (report.bytes - report.reserved) / rows,
        "reserved_bytes": report.reserved / rows,
        "fp16_bytes": report.fp16_bytes / rows,
        "numbers": report.numbers / rows,
        "constant_bytes": report.constant_bytes,
        "nominal_bits": report.nominal_bits,
        "packed_bits": report.packed_bits,
    }


def cache_summary(records: Sequence[Record]) -> dict[str, float]:
    """Bits per cached number and mean bytes per sequence, over the `cache` entries of all records.

    nominal_bits counts codes alone, packed_bits adds scales and outliers, measured_bits adds full-precision windows and
    unused room, but for that reserved for later tokens. Constants (codebooks) are shared by all sequences and counted
    separately. packed_bits is that of all packed tokens together; 0 if there are none.
    """
    caches = [record["cache"] for record in records]
    held, plain = sum(cache["bytes"] for cache in caches), sum(cache["fp16_bytes"] for cache in caches)
    # Samples of before had no sliding windows taken off their bytes in 16 bits.
    numbers = sum(cache.get("numbers", cache["fp16_bytes"] / 2) for cache in caches)
    return {
        "nominal_bits": caches[0]["nominal_bits"],
        "packed_bits": mean_packed_bits([(cache, 1) for cache in caches]),
        "measured_bits": 8 * held / numbers,
        "bytes": held / len(caches),
        "fp16_bytes": plain / len(caches),
        "ratio": plain / held,
        "constant_bytes": caches[0]["constant_bytes"],
        "tokens": sum(cache["tokens"] for cache in caches) / len(caches),
        "compressed_tokens": sum(cache["compressed"] for cache in caches) / len(caches),
    }


def mean_packed_bits(caches: Sequence[tuple[Mapping[str, float], int]]) -> float:
    """Mean of `packed_bits` over the packed tokens of cache records, given as `(record, rows)`; 0 without any."""
    packed = [(cache["packed_bits"], cache["compressed"] * rows) for cache, rows in caches]
    total = sum(tokens for _, tokens in packed)
    return sum(bits * tokens for bits, tokens in packed) / total if total else 0.0


def mean_and_stderr(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error (None for a single value)."""
    mean = sum(values) / len(values)
    if len(values) < 2:
        return mean, None
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, sqrt(variance / len(values))

"""Recommend a method for a model, a memory, and texts of a length: what fits, measured on a few windows of text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli.benchmarking.baselines import BenchmarkedCache, DynamicCacheBaseline, KvqCache
from kvq_cli.benchmarking.capacity import Capacity, capacity, serving_layout
from kvq_cli.benchmarking.generate import BenchmarkGrid, measure
from kvq_cli.errors import UsageError
from kvq_cli.evaluation.base import PERPLEXITY, ComparedMethod, Tracker
from kvq_cli.evaluation.compared_methods import compared_methods
from kvq_cli.evaluation.runner import evaluate
from kvq_cli.evaluation.settings import EvaluationSettings
from kvq_cli.methods.base import Method, ModelShape
from kvq_cli.methods.registry import build
from kvq_cli.units import human_bytes

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from kvq_cli.artifact import Artifact
    from kvq_cli.models import LoadedModel

#: Methods by the bits that are tried, from the most on. Of each, the most bits that fit are measured: klt diverges
#: least where it can be calibrated, the others need no calibration; all have kernels.
LADDERS: tuple[tuple[str, tuple[float, ...]], ...] = (
    ("klt", (4, 3, 2.25, 2)),
    ("innerq", (4, 3, 2)),
    ("kivi", (8, 4, 2)),
)
PLAIN = "fp16"
#: Nats per token up to which divergences count as equal: about 1 % of perplexity.
EQUAL_KL = 0.01
#: Windows of the text and their tokens: of the second half of each, predictions are compared.
WINDOWS, SEQLEN = 3, 1024
#: Tokens that are decoded to time one, in this many rounds.
TIMED_TOKENS, ROUNDS = 8, 2


@dataclass(frozen=True)
class Need:
    """What must fit: `users` texts of `context` tokens at a time, weights and cache in `room` bytes.

    weights: bytes of the model. limit: the longest text that it takes.
    """

    shape: ModelShape
    weights: int
    limit: int
    room: int
    context: int
    users: int

    def capacity(self, method: Method) -> Capacity:
        """What the method takes, and how far it reaches."""
        return capacity(method, self.shape, self.weights, self.limit, self.context, self.users, self.room)


@dataclass(frozen=True)
class Candidate:
    """A method that fits."""

    method: Method
    capacity: Capacity


@dataclass(frozen=True)
class Measured:
    """A candidate on the text, beside the uncompressed model.

    kl: in nats per token, kl_error: its standard error over windows. top1: share of equal likeliest tokens. perplexity:
    the share by which it is above the uncompressed model's. ms: milliseconds of a decoded token after a window's
    tokens; ms_plain: with transformers' own cache. served: whether `kvq serve` takes the method.
    """

    label: str
    capacity: Capacity
    kl: float
    kl_error: float | None
    top1: float
    perplexity: float
    ms: float
    ms_plain: float
    served: bool

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "capacity": self.capacity.to_dict()}


def candidates(need: Need) -> list[Candidate]:
    """Of each ladder, the method with the most bits that fits; first the uncompressed cache, if it does.

    UsageError if nothing fits, with the longest context and the most users of the method that takes least.
    """
    found: list[Candidate] = []
    smallest: Candidate | None = None
    for name, ladder in ((PLAIN, (None,)), *LADDERS):
        for bits in ladder:
            method = build(name, **({} if bits is None else {"bits": bits}))
            try:
                candidate = Candidate(method, need.capacity(method))
            except UsageError:
                continue  # groups that do not fit the model's head_dim
            if smallest is None or candidate.capacity.cache < smallest.capacity.cache:
                smallest = candidate
            if candidate.capacity.fits:
                found.append(candidate)
                break
    if not found:
        raise _nothing_fits(need, smallest)
    return found


def _nothing_fits(need: Need, smallest: Candidate | None) -> UsageError:
    if need.room <= need.weights:
        room = human_bytes(max(0, need.room))
        return UsageError(
            f"the weights take {human_bytes(need.weights)}, of {room} beside --reserve, so that no cache fits: raise "
            "--memory, lower --reserve, or take a smaller --model"
        )
    what = f"--users {need.users} x --context {need.context}"
    if smallest is None or need.context > need.limit:
        return UsageError(f"{what}: the model takes texts of {need.limit:,} tokens at most")
    own, method = smallest.capacity, smallest.method
    taken = human_bytes(own.weights + own.artifact + own.cache)
    return UsageError(
        f"{what} does not fit into {human_bytes(need.room)} beside --reserve: {method.name} at {method.nominal_bits:g} "
        f"bits takes {taken} with the weights; of it, --context {own.context} or --users {own.batch} fit"
    )


def measured(
    loaded: LoadedModel,
    chosen: Sequence[tuple[Candidate, Method | Artifact]],
    dataset: str,
    folder: Path,
    seed: int = 0,
    *,
    command: str | None = None,
    track: Tracker = lambda description, total, done: lambda count: None,
    note: Callable[[str], None] = lambda _: None,
) -> Iterator[Measured]:
    """Measure the candidates on `WINDOWS` windows of the dataset; finished windows are kept in `folder`. One that leads
    the model out of its dtype's range is left out with a note.

    Tokens are timed anew at each call, on this device, after as many tokens as a window has.
    """
    compared = compared_methods([attachable for _, attachable in chosen])
    seqlen = loaded.default_length(SEQLEN)
    settings = EvaluationSettings((PERPLEXITY,), samples=WINDOWS, datasets=(dataset,), seqlens=(seqlen,), seed=seed)
    document = evaluate(loaded, compared, settings, folder, command=command, track=track, note=note)
    left = [
        (candidate, one)
        for (candidate, _), one in zip(chosen, compared, strict=True)
        if one.label in document["methods"]
    ]
    context = min(seqlen, loaded.context - TIMED_TOKENS)
    times, plain = _token_times(loaded, [one for _, one in left], context, track)
    for candidate, one in left:
        scores = document["methods"][one.label]["results"][PERPLEXITY]
        yield Measured(
            one.label,
            candidate.capacity,
            scores["kl,none"],
            scores["kl_stderr,none"],
            scores["top1,none"],
            round(scores["perplexity,none"] / scores["perplexity_uncompressed,none"] - 1, 6) + 0.0,  # no -0.0
            times[one.label],
            plain,
            is_served(candidate.method, loaded.shape, loaded.model.config),
        )


def _token_times(
    loaded: LoadedModel, compared: Sequence[ComparedMethod], context: int, track: Tracker
) -> tuple[dict[str, float], float]:
    """Median milliseconds of a decoded token of each method, and with transformers' cache, measured in turns."""
    plain = DynamicCacheBaseline()
    caches: dict[str, BenchmarkedCache] = {
        one.label: KvqCache(one.attachable, one.label, one.method.nominal_bits, "exact") for one in compared
    }
    grid = BenchmarkGrid((context,), (1,), TIMED_TOKENS, ROUNDS, seed=0)
    advance = track("timing a token", grid.runs * (1 + len(caches)), 0)
    rows = measure(loaded.model, [plain, *caches.values()], grid, lambda: advance(1))
    times = {row["peer"]: row["token_ms"]["p50"] for row in rows}
    return {label: times[cache.name] for label, cache in caches.items()}, times[plain.name]


def is_served(method: Method, shape: ModelShape, config: PretrainedConfig) -> bool:
    """Return whether `kvq serve` takes the method, with the options that it sets by itself, and the model of this
    `config`."""
    from kvq_cli.vllm.checks import check_model
    from kvq_cli.vllm.served import SERVER_DEFAULTS

    try:
        check_model(config, "the model")
        serving_layout(build(method.name, **_bits(method), **SERVER_DEFAULTS.get(method.name, {})), shape)
    except UsageError:
        return False
    return True


def _bits(method: Method) -> dict[str, Any]:
    return {"bits": method.bits} if hasattr(method, "bits") else {}


def best(rows: Sequence[Measured]) -> Measured:
    """Choose, of the methods that diverge as little as the one of least KL, the fastest: see `as_close`."""
    least = min(rows, key=lambda row: row.kl)
    return min((row for row in rows if as_close(row, least)), key=lambda row: (row.ms, row.kl))


def as_close(row: Measured, least: Measured) -> bool:
    """Return whether a KL counts as equal to the least: it is at most `EQUAL_KL`, or within both standard errors of
    it."""
    return row.kl <= EQUAL_KL or row.kl - least.kl <= (row.kl_error or 0.0) + (least.kl_error or 0.0)


def reason(row: Measured, rows: Sequence[Measured], need: Need, plain: Candidate | None) -> str:
    """Say in one sentence why `row`, of `rows`. plain: the uncompressed cache, if it fits."""
    least = min(rows, key=lambda row: row.kl)
    if row is least:
        why = f"diverges least, {row.kl:.4f} nats per token"
    else:
        equal = f"both below {EQUAL_KL:g}" if row.kl <= EQUAL_KL else "within their errors"
        why = (
            f"decodes a token in {row.ms:.1f} ms, {least.label} in {least.ms:.1f} ms, at a KL of {row.kl:.4f} and "
            f"{least.kl:.4f} nats per token, {equal}"
        )
    if plain is None:
        return f"Take {row.label}: of what fits, it {why}."
    texts = f"{need.users} {'text' if need.users == 1 else 'texts'} of {need.context:,} tokens"
    size = human_bytes(plain.capacity.cache)
    return f"Compress nothing, since {texts} take {size} in 16 bits; for more, take {row.label}, which {why}."

"""Estimate how long an evaluation takes before it starts: time a short trial of each method."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch

from kvq_cli.cache_argument import cache_argument
from kvq_cli.distributed import Workers, threads_per_task
from kvq_cli.errors import NotFiniteError
from kvq_cli.evaluation.base import Evaluation
from kvq_cli.evaluation.divergence import divergence
from kvq_cli.evaluation.scoring import continuation_logits
from kvq_cli.models import vocabulary

if TYPE_CHECKING:
    from kvq_cli.attention.attach import Attached
    from kvq_cli.evaluation.sample_log import SampleLog
    from kvq_cli.models import LoadedModel

SHARE = 200
"""The trials read about 1/200 of the tokens of the evaluation, two or three times."""
SHORTEST, LONGEST = 16, 512
"""Prompt tokens of a trial."""
STEPS = 3
"""Decode steps of a trial."""


@dataclass(frozen=True)
class Speed:
    """Seconds per token of a pass, without and with logits, and per decode step."""

    token: float
    scored: float
    step: float


@torch.inference_mode()
def measure_speed(attached: Attached, tokens: int, scores: bool, decodes: bool) -> Speed:
    """Time a pass of `tokens` tokens, one with logits of the second half if `scores`, and decode steps if `decodes`.

    The prompt counts through the vocabulary: a method's time depends on the number of tokens, not on which they are.
    """
    model = attached.model
    ids = (torch.arange(tokens + STEPS) % vocabulary(model)).tolist()
    inputs = torch.tensor([ids], device=model.device)
    cache = attached.new_cache(tokens + STEPS)

    def run(begin: int, end: int) -> float:
        started = time.monotonic()
        passed = {**cache_argument(cache), "use_cache": True}
        model(inputs[:, begin:end], **passed, logits_to_keep=1).logits.sum().item()
        return time.monotonic() - started

    prompt = run(0, tokens) / tokens
    step = min(run(tokens + n, tokens + n + 1) for n in range(STEPS)) if decodes else 0.0
    if not scores:
        return Speed(prompt, prompt, step)
    started = time.monotonic()
    [logits], _ = continuation_logits(attached, [ids[: tokens // 2]], [ids[tokens // 2 : tokens]])
    divergence(logits, logits, inputs[0, tokens // 2 - 1 : tokens])
    both = time.monotonic() - started
    return Speed(prompt, max(prompt, 2 * both / tokens - prompt), step)


@torch.inference_mode()
def _measure_plain(loaded: LoadedModel, tokens: int) -> float:
    """Seconds per token of the uncompressed model's pass with logits of the second half."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device=loaded.model.device)
    started = time.monotonic()
    loaded.model(ids, use_cache=False, logits_to_keep=tokens // 2).logits.sum().item()
    return (time.monotonic() - started) / tokens


def estimate(
    loaded: LoadedModel,
    evaluations: Sequence[Evaluation],
    attached: Mapping[str, Attached],
    logs: Mapping[tuple[str, str], SampleLog],
    workers: Workers | None = None,
) -> str | None:
    """`about 0:12:30 for 513 samples, ...`: the time that the unfinished samples take; None if all are finished.

    logs: finished samples by label and evaluation. Configurations of a method are taken to be equally fast; answers to
    be as long as they may be; workers to be as fast as this process, and ready.
    """
    left = [
        (label, evaluation, pending)
        for evaluation in evaluations
        for label in attached
        if (pending := sum(index not in logs[label, evaluation.name].records for index in range(evaluation.count)))
    ]
    if not left:
        return None
    family = {label: each.method.name for label, each in attached.items()}
    names = {family[label]: label for label, _, _ in left}  # a label for each method to time
    total = sum(pending * evaluation.work.prompt for _, evaluation, pending in left)
    longest = min(LONGEST, loaded.context - STEPS, max(evaluation.work.prompt for _, evaluation, _ in left))
    tokens = min(longest, max(SHORTEST, total // (SHARE * len(names))))
    scores, decodes = (any(getattr(each.work, kind) for _, each, _ in left) for kind in ("scored", "decoded"))
    speeds = {}
    with _threads_of(workers):
        for name, label in names.items():
            with suppress(NotFiniteError):  # of the trial's tokens, perhaps not of the samples'
                speeds[name] = measure_speed(attached[label], tokens, scores, decodes)
        plain = _measure_plain(loaded, tokens) if scores and speeds else 0.0
    if not speeds:
        return None
    left = [each for each in left if family[each[0]] in speeds]
    seconds = sum(pending * _seconds(evaluation, speeds[family[label]]) for label, evaluation, pending in left)
    if scores:  # methods share the uncompressed model's pass
        passes = {
            evaluation: max(pending for _, each, pending in left if each is evaluation) for _, evaluation, _ in left
        }
        read = sum(pending * each.work.prompt for each, pending in passes.items() if each.work.scored)
        seconds += read * plain
    if workers is not None:
        seconds /= workers.count
    answers = ", if answers are as long as they may be" if any(each.work.decoded for _, each, _ in left) else ""
    samples = sum(pending for _, _, pending in left)
    return (
        f"about {timedelta(seconds=round(seconds))} for {samples} samples{answers}"
        f" ({_count(len(speeds), 'method')} timed on {_count(tokens, 'token')}"
        + ("" if workers is None else f", {_count(workers.count, 'worker')}")
        + ")"
    )


@contextmanager
def _threads_of(workers: Workers | None) -> Iterator[None]:
    """Inside the block, compute on as many threads as a worker does: more would compete with those of busy workers, and
    the estimate would be several times too long."""
    before = torch.get_num_threads()
    if workers is not None:
        torch.set_num_threads(min(before, threads_per_task()))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _seconds(evaluation: Evaluation, speed: Speed) -> float:
    work = evaluation.work
    steps = work.decoded / evaluation.batch_size
    return (work.prompt - work.scored) * speed.token + work.scored * speed.scored + steps * speed.step


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")

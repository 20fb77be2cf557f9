"""Evaluate units of samples on workers, which load the model and attach the methods as this process did."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch

from kvq_cli.attention.attach import Attached, attach
from kvq_cli.distributed import Workers, threads_per_task
from kvq_cli.errors import KvqError, NotFiniteError
from kvq_cli.evaluation.base import ComparedMethod, Evaluation, Record
from kvq_cli.evaluation.settings import EvaluationSettings, build_evaluations
from kvq_cli.model_source import ModelSource
from kvq_cli.models import LoadedModel

Unit = Mapping[str, Sequence[int]]
#: A method of a unit and its records, or the error with which the unit ended.
Finished = tuple[str, list[Record]] | NotFiniteError


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker needs to compute the records that this process would.

    threads: at most; a worker takes its share of its machine. state: what must be the same there; see `_state`.
    """

    source: ModelSource
    settings: EvaluationSettings
    methods: Sequence[ComparedMethod]
    threads: int
    state: Mapping[str, Any]
    key: str = field(default_factory=lambda: uuid.uuid4().hex)


class RemoteEvaluation:
    """Evaluates units of several evaluations on workers."""

    def __init__(
        self,
        workers: Workers,
        loaded: LoadedModel,
        settings: EvaluationSettings,
        methods: Sequence[ComparedMethod],
        evaluations: Sequence[Evaluation],
        attached: Mapping[str, Attached],
    ) -> None:
        self._workers = workers
        self._setup = WorkerSetup(
            ModelSource.of(loaded), settings, methods, torch.get_num_threads(), _state(evaluations, attached)
        )

    def run(self, name: str, units: Iterator[Unit]) -> Iterator[tuple[Unit, Iterator[tuple[str, list[Record]]]]]:
        """Yield each unit of the evaluation `name` with an iterator like that of `Evaluation.run`, in order."""
        named = ((name, unit) for unit in units)
        for (_, unit), results in groupby(self._workers.run(evaluate_unit, self._setup, named), itemgetter(0)):
            yield unit, _finished(results)


def _finished(results: Iterator[tuple[Any, Finished]]) -> Iterator[tuple[str, list[Record]]]:
    """What `Evaluation.run` yielded and raised."""
    for _, finished in results:
        if isinstance(finished, NotFiniteError):
            raise finished
        yield finished


@dataclass(frozen=True)
class _Worker:
    loaded: LoadedModel
    evaluations: Mapping[str, Evaluation]
    attached: Mapping[str, Attached]
    attachments: ExitStack  # open as long as the worker lives


_ready: dict[str, _Worker] = {}
"""The newest setup of this worker process, by its key."""


def evaluate_unit(setup: WorkerSetup, task: tuple[str, Unit]) -> Iterator[Finished]:
    """Runs in a worker. KvqError if the model, the samples or the backends differ from those of the process that sent
    the task."""
    if setup.key not in _ready:
        _ready.clear()
        _ready[setup.key] = _make_ready(setup)
    worker, (name, unit) = _ready[setup.key], task
    for other in worker.evaluations.values():
        if other.name != name:
            other.forget()
    try:
        yield from worker.evaluations[name].run(worker.loaded, worker.attached, unit)
    except NotFiniteError as error:
        yield error  # raised by `Workers.run`, it would end the other tasks, too


def _make_ready(setup: WorkerSetup) -> _Worker:
    torch.set_num_threads(min(setup.threads, threads_per_task()))
    loaded = setup.source.load()
    evaluations = build_evaluations(setup.settings, loaded, lambda *_: lambda _: None)
    attachments = ExitStack()
    attached = {
        method.label: attachments.enter_context(
            attach(loaded.model, method.attachable, prefill=setup.settings.prefill, backend=setup.settings.backend)
        )
        for method in setup.methods
    }
    here = _state(evaluations, attached)
    for what, value in setup.state.items():
        if here[what] != value:
            raise KvqError(f"a worker has another {what}: {here[what]} instead of {value}")
    return _Worker(loaded, {each.name: each for each in evaluations}, attached, attachments)


def _state(evaluations: Sequence[Evaluation], attached: Mapping[str, Attached]) -> dict[str, Any]:
    """What records depend on beside the setup: the samples, the kernels."""
    return {
        "evaluation": {each.name: {**each.config, **each.resume_key} for each in evaluations},
        "attention backend": {label: each.backend.summary for label, each in attached.items()},
    }

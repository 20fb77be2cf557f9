"""Evaluate units of samples on workers, which load the model and attach the methods as this process did."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from kvq_cli.artifact.fingerprint import fingerprint
from kvq_cli.attention.attach import Attached, attach
from kvq_cli.distributed import Workers
from kvq_cli.errors import KvqError, NotFiniteError
from kvq_cli.evaluation.base import ComparedMethod, Evaluation, Record
from kvq_cli.evaluation.settings import EvaluationSettings, build_evaluations
from kvq_cli.models import LoadedModel, load_model

Unit = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class WorkerSetup:
    """What a worker needs to compute the records that this process would.

    folder: the working folder, in which relative paths are found. state: what must be the same there; see `_state`.
    """

    model: str
    device: str
    dtype: str
    trust_remote_code: bool
    settings: EvaluationSettings
    methods: Sequence[ComparedMethod]
    threads: int
    state: Mapping[str, Any]
    folder: str = field(default_factory=os.getcwd)
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
        dtype = str(loaded.model.dtype).removeprefix("torch.")
        self._setup = WorkerSetup(
            loaded.name,
            loaded.model.device.type,
            dtype,
            loaded.trust_remote_code,
            settings,
            methods,
            workers.threads,
            _state(loaded, evaluations, attached),
        )

    def run(self, name: str, units: Iterator[Unit]) -> Iterator[tuple[Unit, Iterator[tuple[str, list[Record]]]]]:
        """Yield each unit of the evaluation `name` with an iterator like that of `Evaluation.run`, in order."""
        named = ((name, unit) for unit in units)
        for (_, unit), finished in self._workers.run(evaluate_unit, self._setup, named):
            yield unit, finished.replay()


@dataclass(frozen=True)
class FinishedUnit:
    """What `Evaluation.run` yielded, and the error with which it ended."""

    results: list[tuple[str, list[Record]]]
    error: NotFiniteError | None

    def replay(self) -> Iterator[tuple[str, list[Record]]]:
        """Yield and raise the same."""
        yield from self.results
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class _Worker:
    loaded: LoadedModel
    evaluations: Mapping[str, Evaluation]
    attached: Mapping[str, Attached]
    attachments: ExitStack  # open as long as the worker lives


_ready: dict[str, _Worker] = {}
"""The newest setup of this worker process, by its key."""


def evaluate_unit(setup: WorkerSetup, task: tuple[str, Unit]) -> FinishedUnit:
    """Runs in a worker. KvqError if the model, the samples or the backends differ from those of the process that sent
    the task."""
    if setup.key not in _ready:
        _ready.clear()
        _ready[setup.key] = _make_ready(setup)
    worker, (name, unit) = _ready[setup.key], task
    results: list[tuple[str, list[Record]]] = []
    try:
        for finished in worker.evaluations[name].run(worker.loaded, worker.attached, unit):
            results.append(finished)
    except NotFiniteError as error:
        return FinishedUnit(results, error)
    return FinishedUnit(results, None)


def _make_ready(setup: WorkerSetup) -> _Worker:
    import torch

    with suppress(OSError):  # a machine without this folder finds files by absolute paths
        os.chdir(setup.folder)
    torch.set_num_threads(setup.threads)
    loaded = load_model(setup.model, setup.device, setup.dtype, trust_remote_code=setup.trust_remote_code)
    evaluations = build_evaluations(setup.settings, loaded, lambda *_: lambda _: None)
    attachments = ExitStack()
    attached = {
        method.label: attachments.enter_context(
            attach(loaded.model, method.attachable, prefill=setup.settings.prefill, backend=setup.settings.backend)
        )
        for method in setup.methods
    }
    here = _state(loaded, evaluations, attached)
    for what, value in setup.state.items():
        if here[what] != value:
            raise KvqError(f"a worker has another {what}: {here[what]} instead of {value}")
    return _Worker(loaded, {each.name: each for each in evaluations}, attached, attachments)


def _state(loaded: LoadedModel, evaluations: Sequence[Evaluation], attached: Mapping[str, Attached]) -> dict[str, Any]:
    """What records depend on beside the setup: the model, the samples, the kernels."""
    return {
        "model": asdict(fingerprint(loaded.model)),
        "revision of the model": loaded.revision,
        "evaluation": {each.name: dict(each.config) for each in evaluations},
        "attention backend": {label: each.backend.summary for label, each in attached.items()},
    }

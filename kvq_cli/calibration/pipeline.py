"""Run a calibration in resumable steps: text -> captured activations -> codebooks -> artifact, or weights -> factors ->
artifact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from kvq_cli.artifact import Artifact, check_replaceable, load_artifact, save_artifact
from kvq_cli.artifact.contents import tensor_sizes
from kvq_cli.calibration.card import card
from kvq_cli.calibration.finished import Note, check_unchanged
from kvq_cli.calibration.kinds.base import CalibrationPlan, Progress
from kvq_cli.calibration.parallel import deterministic
from kvq_cli.calibration.settings import calibrate_command
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.distributed import Workers
from kvq_cli.errors import KvqError, WorkerDiedError


def calibrate(
    plan: CalibrationPlan,
    out: Path,
    *,
    resume: bool = False,
    force: bool = False,
    captured: Path | None = None,
    progress: Progress = lambda *_: None,
    note: Note = lambda _: None,
    workers: Workers | None = None,
) -> Artifact:
    """Calibrate and write the artifact to `out`. Finished steps are kept in `<out>.work` until the end.

    An interruption (also a kill, or dead workers) leaves that folder, and `resume` continues from it to the same
    bytes, also with `force`; another failure removes it, unless it was resumed. captured: folder in which captured
    activations are kept, for other calibrations that capture the same. note: told what `resume` cannot check of a
    finished artifact. workers: capture samples and calibrate streams there, to the same bytes; factors of weights are
    computed here.
    Raises UsageError where `out` or the folder exists and neither `resume` nor `force` is given, or was made from other
    inputs, KvqError where another process uses the folder.
    """
    with work_folder(out, resume=resume, force=force) as work:
        if work is None:
            return _load_finished(out, plan, note)
        disk_bytes = plan.step_bytes() if captured else plan.disk_bytes()
        work.open(_work_request(plan, progress), resume=resume, disk_bytes=disk_bytes)
        try:
            with deterministic(plan.loaded.model.device):
                tensors, measured = plan.run(work, captured, progress, note, workers)
            artifact = _write(plan, out, tensors, measured, progress)
        except (KvqError, OSError) as error:
            # The steps that earlier runs finished are not this failure's to remove.
            if not resume and not isinstance(error, WorkerDiedError):
                work.remove()
            raise
        work.remove()
    return artifact


@contextmanager
def work_folder(out: Path, *, resume: bool, force: bool) -> Iterator[WorkFolder | None]:
    """`<out>.work`, once `force` has removed that of an earlier run; None where `resume` finds the artifact finished.

    Raises UsageError where `out` exists and neither is given, KvqError where another process uses the folder.
    """
    with closing(WorkFolder(out.with_name(out.name + ".work"))) as work:
        if force and not resume:
            work.clear()
        elif not force and out.exists() and resume and not work.path.exists():
            yield None
            return
        check_replaceable(out, overwrite=force or resume)
        yield work


def _work_request(plan: CalibrationPlan, progress: Progress) -> dict[str, Any]:
    """Everything that unfinished steps depend on. Reads the text."""
    request = plan.request() | plan.named_inputs
    if plan.settings_dict():
        progress("read text", 0, 1)
    return request | plan.text_tokens


def _load_finished(out: Path, plan: CalibrationPlan, note: Note) -> Artifact:
    artifact = load_artifact(out)
    check_unchanged(artifact, plan.request(), artifact.config, plan.named_inputs, note)
    return artifact


def _write(
    plan: CalibrationPlan,
    out: Path,
    tensors: dict[str, Tensor],
    measured: dict[str, Any],
    progress: Progress,
) -> Artifact:
    progress("write", 0, 1)
    made_from = {**plan.request(), "inputs": plan.inputs, "versions": plan.versions()}
    config = {**made_from, "sizes": tensor_sizes(tensors), **measured}
    command = calibrate_command(plan.method, plan.loaded, plan.settings_dict())
    artifact = save_artifact(out, config, tensors, card(config, command), overwrite=True)
    progress("write", 1, 1)
    return artifact

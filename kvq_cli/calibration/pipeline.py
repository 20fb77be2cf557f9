"""Run a calibration in resumable steps: text -> captured activations -> codebooks -> artifact, or weights -> factors ->
artifact."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from torch import Tensor

from kvq_cli.artifact import Artifact, check_replaceable, load_artifact, save_artifact
from kvq_cli.artifact.contents import tensor_sizes
from kvq_cli.attention.capture_points import AttentionLayer, attention_layers
from kvq_cli.calibration import capture, estimate, factors, low_rank, mixed, remote, transforms
from kvq_cli.calibration.card import card
from kvq_cli.calibration.codebooks import ERROR_MEASURE
from kvq_cli.calibration.finished import Note, check_unchanged
from kvq_cli.calibration.parallel import deterministic, run_parallel
from kvq_cli.calibration.plan import AnyPlan, CapturePlan, CodebookPlan, FactorPlan, TransformPlan, WhitenedPlan
from kvq_cli.calibration.samples import SampleCapture, capturing
from kvq_cli.calibration.settings import calibrate_command
from kvq_cli.calibration.streams import (
    KINDS,
    Calibrated,
    Progress,
    StreamsPlan,
    by_own_method,
    cluster_all,
    clustering,
    stream_name,
    transform_codes,
)
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.data.texts import sampled_windows
from kvq_cli.distributed import Workers
from kvq_cli.errors import KvqError, WorkerDiedError
from kvq_cli.methods.base import LowRankSpec
from kvq_cli.models import check_token_ids

#: Windows of text that PALU's sums are written after: a resumed run reads fewer again. The sums of Llama-3.1-8B take
#: 270 MB.
_SAVED_EVERY = 4
_SUMS = "sums"


def calibrate(
    plan: AnyPlan,
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
        disk_bytes = estimate.step_bytes(plan) if captured else estimate.disk_bytes(plan)
        work.open(_work_request(plan, progress), resume=resume, disk_bytes=disk_bytes)
        try:
            with deterministic(plan.loaded.model.device):
                if isinstance(plan, FactorPlan):
                    tensors, measured = _factorize_all(plan, work, progress)
                else:
                    with captures_folder(plan, work, captured, note) as captures:
                        capture_all(plan, captures, progress, workers)
                        tensors, measured = _make_codebooks(plan, work, captures, progress, workers)
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


def _work_request(plan: AnyPlan, progress: Progress) -> dict[str, Any]:
    """Everything that unfinished steps depend on. Reads the text."""
    request = plan.request() | plan.named_inputs
    if plan.settings_dict():
        progress("read text", 0, 1)
    return request | plan.text_tokens


def _load_finished(out: Path, plan: AnyPlan, note: Note) -> Artifact:
    artifact = load_artifact(out)
    check_unchanged(artifact, plan.request(), artifact.config, plan.named_inputs, note)
    return artifact


def _factorize_all(plan: FactorPlan, work: WorkFolder, progress: Progress) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Factors of every layer's weights: the artifact's tensors, and their errors."""
    steps = plan.spec.layers
    progress("factorize", 0, len(steps))
    layers = attention_layers(plan.loaded.model)
    if isinstance(plan, WhitenedPlan):
        _second_moments(plan, work, layers, progress)
    tensors: dict[str, Tensor] = {}
    measured = []
    for layer, names in zip(layers, steps, strict=True):
        step = f"{layer.index}.factors"
        errors = work.read_json(step)
        if errors is None:
            factorized, errors = _factorized(plan, work, layer, names)
            work.write_tensors(step, {key: tensor.cpu() for key, tensor in factorized.items()})
            work.write_json(step, errors)  # last: marks the step as finished
        tensors |= {f"layers.{layer.index}.{key}": tensor for key, tensor in work.read_tensors(step).items()}
        measured.append(errors)
        progress("factorize", layer.index + 1, len(steps))
    measure = low_rank.ERROR_MEASURE if isinstance(plan.spec, LowRankSpec) else factors.ERROR_MEASURE
    return tensors, {"errors": {"measure": measure, "layers": measured}}


def _factorized(plan: FactorPlan, work: WorkFolder, layer: AttentionLayer, names: tuple[str, ...]) -> Calibrated:
    """The factors of a layer's weights, and their errors."""
    if not isinstance(plan.spec, LowRankSpec):
        return factors.factorize(layer, names, plan.loaded.shape.dtype)
    moments = work.read_tensors(f"{layer.index}.moments") if plan.spec.whiten else None
    return low_rank.factorize_groups(layer, plan.spec, plan.loaded.shape, moments)


def _second_moments(plan: WhitenedPlan, work: WorkFolder, layers: Sequence[AttentionLayer], progress: Progress) -> None:
    """Write the second moments of what W_k and W_v give on the text, by layer."""
    windows = _windows(plan, work, progress)
    if not work.has_tensors(f"{layers[-1].index}.moments"):  # the last that is written
        with low_rank.SecondMoments(layers, plan.spec, plan.loaded.shape) as moments:
            if work.has_tensors(_SUMS):
                moments.resume(work.read_tensors(_SUMS))
            first = moments.tokens // windows.shape[1]
            progress("read activations", first, len(windows))
            for done, window in enumerate(windows[first:], first + 1):
                capture.forward(plan.loaded.model, window)
                if done % _SAVED_EVERY == 0:
                    work.write_tensors(_SUMS, moments.sums())
                progress("read activations", done, len(windows))
        for layer, found in moments.by_layer().items():
            work.write_tensors(f"{layer}.moments", {kind: moment.cpu() for kind, moment in found.items()})
    progress("read activations", len(windows), len(windows))


@contextmanager
def captures_folder(plan: CapturePlan, work: WorkFolder, captured: Path | None, note: Note) -> Iterator[WorkFolder]:
    """The folder of the captured activations: `work`, or one below `captured`, named by what it depends on.

    Waits while another process captures the same activations, and tells `note` so.
    """
    if captured is None:
        yield work
        return
    request = plan.capture_request()
    name = sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]
    with closing(WorkFolder(captured / name)) as captures:
        captures.open(request, resume=True, disk_bytes=plan.capture.nbytes, shared=True, note=note)
        yield captures


def _make_codebooks(
    plan: StreamsPlan, work: WorkFolder, captures: WorkFolder, progress: Progress, workers: Workers | None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Codebooks of every layer's keys and values: the artifact's tensors, and their errors."""
    if isinstance(plan, CodebookPlan):
        cluster, measure = clustering(plan), ERROR_MEASURE
    elif isinstance(plan, TransformPlan):
        cluster, measure = transform_codes(plan, work, captures, progress, workers), transforms.ERROR_MEASURE
    else:
        cluster, measure = by_own_method(plan), mixed.ERROR_MEASURE
    errors = cluster_all(plan, work, captures, cluster, progress, workers)
    tensors = {
        f"layers.{stream_name(layer, kind)}.{key}": tensor
        for layer in range(plan.loaded.shape.layers)
        for kind in KINDS
        for key, tensor in work.read_tensors(stream_name(layer, kind)).items()
    }
    return tensors, {"captured": captured_tokens(plan), "errors": {"measure": measure, "layers": errors}}


def captured_tokens(plan: CapturePlan) -> dict[str, int]:
    """The entry `captured` of an artifact's config."""
    return {
        "tokens": plan.capture.tokens * plan.settings.samples,
        "tokens_with_gradients": plan.capture.tokens * plan.settings.gradients,
        "tokens_held_out": plan.capture.tokens * plan.settings.held_out,
    }


def capture_all(plan: CapturePlan, captures: WorkFolder, progress: Progress, workers: Workers | None = None) -> None:
    """Run every sample through the model, and write its captured tokens to disk before the next ones run.

    captures: of `captures_folder`; other calibrations may read it from then on.
    """
    settings = plan.settings
    windows = _windows(plan, captures, progress)
    done = (captures.read_json("captured") or {"samples": 0})["samples"]
    progress("capture", done, settings.samples)
    if done == settings.samples:
        return captures.share()
    sampled = SampleCapture(windows, plan.capture, settings.gradients, settings.seed)

    if workers is None:
        finished = _capture_here(plan, sampled, captures, done)
    else:
        finished = _capture_on(workers, plan, sampled, captures, done)
    for done in finished:
        progress("capture", done, settings.samples)
    captures.share()


def _capture_here(plan: CapturePlan, sampled: SampleCapture, captures: WorkFolder, done: int) -> Iterator[int]:
    """Capture the samples from `done` on in parallel; yields how many are captured."""
    loaded, samples = plan.loaded, plan.settings.samples
    layers, workers = attention_layers(loaded.model), estimate.capture_workers(plan)

    def run_sample(sample: int) -> None:
        sampled.run(loaded, layers, sample, partial(_write_sample, captures, sample), threads=workers > 1)

    with capturing(loaded, layers, plan.settings.seqlen):
        while done < samples:
            # A batch ends before the next one starts, so that the samples counted as done have no gaps.
            batch = range(done, min(done + workers, samples))
            for _ in run_parallel(run_sample, batch, workers):
                done += 1
                yield done
            captures.count_samples(done)


def _capture_on(
    workers: Workers, plan: CapturePlan, sampled: SampleCapture, captures: WorkFolder, done: int
) -> Iterator[int]:
    """The same on workers."""
    for sample, numbers in remote.capture_on(workers, plan.loaded, sampled, range(done, plan.settings.samples)):
        for captured in numbers:
            _write_sample(captures, sample, *captured)
        if sample == done:  # after Ctrl-C, the samples that arrive have gaps
            done += 1
            captures.count_samples(done)
            yield done


def _write_sample(captures: WorkFolder, sample: int, layer: int, kind: str, quantity: str, numbers: Tensor) -> None:
    captures.write_sample(stream_name(layer, kind, quantity), sample, numbers)


def _windows(plan: CapturePlan | WhitenedPlan, captures: WorkFolder, progress: Progress) -> Tensor:
    """The samples, int64 `[samples, seqlen]`; stored, since sampling text from the model takes long."""
    progress("read text", 0, 1)
    if not captures.has_tensors("windows"):
        windows = plan.windows
        if windows is None:
            settings, loaded = plan.settings, plan.loaded
            sizes = (settings.seqlen, settings.samples, settings.seed)
            windows = sampled_windows(loaded.model, loaded.tokenizer, *sizes)
        check_token_ids(plan.loaded.model, windows.tolist())
        captures.write_tensors("windows", {"windows": windows})
    progress("read text", 1, 1)
    return captures.read_tensors("windows")["windows"]


def _write(
    plan: AnyPlan,
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

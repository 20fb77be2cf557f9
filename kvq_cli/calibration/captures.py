"""Capture keys, values and gradients of a text's samples into a folder, in resumable steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from kvq_cli.attention.capture_points import AttentionLayer, attention_layers
from kvq_cli.calibration import estimate, remote
from kvq_cli.calibration.finished import Note
from kvq_cli.calibration.kinds.base import Progress
from kvq_cli.calibration.parallel import run_parallel
from kvq_cli.calibration.samples import SampleCapture, capturing
from kvq_cli.calibration.streams import stream_name
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.distributed import Workers
from kvq_cli.errors import KvqError

if TYPE_CHECKING:
    from kvq_cli.calibration.kinds.capture import CapturePlan


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


def captured_tokens(plan: CapturePlan) -> dict[str, int]:
    """The entry `captured` of an artifact's config."""
    return {
        "tokens": plan.capture.tokens * plan.settings.samples,
        "tokens_with_gradients": plan.capture.tokens * plan.settings.gradients,
        "tokens_held_out": plan.capture.tokens * plan.settings.held_out,
    }


def capture_all(
    plan: CapturePlan, captures: WorkFolder, progress: Progress, workers: Workers | None = None, *, weighted: bool
) -> None:
    """Run every sample through the model, and write its captured tokens to disk before the next ones run.

    captures: of `captures_folder`; other calibrations may read it from then on. weighted: raise KvqError naming the
    first module whose output has no gradients; else all numbers then count the same.
    """
    settings = plan.settings
    windows, layers = plan.read_windows(captures, progress), attention_layers(plan.loaded.model)
    done = (captures.read_json("captured") or {"samples": 0})["samples"]
    progress("capture", done, settings.samples)
    checked = done > 0
    if done < settings.samples:
        sampled = SampleCapture(windows, plan.capture, settings.gradients, settings.seed, plan.spec.near)
        if workers is None:
            finished = _capture_here(plan, layers, sampled, captures, done)
        else:
            finished = _capture_on(workers, plan, sampled, captures, done)
        for done in finished:
            progress("capture", done, settings.samples)
            if weighted and not checked and captures.read_json("captured"):
                missing = _without_gradients(plan, layers, captures, 1)
                # With `near`, some layers may have none in one sample: see `_check_gradients`.
                if not plan.spec.near or len(missing) == len(layers):
                    _check_gradients(plan, missing)
                checked = True
    if (found := captures.read_json("gradients")) is None:
        found = {"missing": _without_gradients(plan, layers, captures, settings.gradients)[:1]}
        captures.write_json("gradients", found)
    if weighted:
        _check_gradients(plan, found["missing"])
    captures.share()


def _check_gradients(plan: CapturePlan, missing: Sequence[str]) -> None:
    """Make a KvqError naming the first module without gradients. Of a method with `near`, those through predictions
    that read it packed count, which a short text may not have."""
    if missing:
        settings, near = plan.settings, plan.spec.near
        unread = (
            f"no prediction in {settings.gradients} windows of {settings.seqlen} tokens attends to what is {near} or "
            "more tokens before it, which it reads packed (raise --seqlen or --samples), or since "
        )
        raise KvqError(
            f"{missing[0]}: its output has no gradients, since {unread if near else ''}a module between it and the "
            "loss has no backward pass: use weights that are not quantized, or do not weight with gradients (kvq "
            "calibrate --no-fisher; klt also --set metric=none)"
        )


def _without_gradients(
    plan: CapturePlan, layers: Sequence[AttentionLayer], captures: WorkFolder, samples: int
) -> list[str]:
    """Return, of each layer, the module whose output has no gradients in the first samples, or only zeros, if there
    is one. Runs nothing: other threads may capture."""
    shape = plan.loaded.shape
    size = (1, plan.capture.tokens, shape.kv_heads, shape.head_dim)

    def only_zeros(layer: int, kind: str, quantity: str) -> bool:
        name = stream_name(layer, kind, quantity)
        return not any(captures.read_samples(name, size, sample).any() for sample in range(samples))

    found = []
    for layer in layers:
        # Where values are always zero, the loss does not depend on keys.
        keys = only_zeros(layer.index, "k", "g") and not only_zeros(layer.index, "v", "x")
        if keys or only_zeros(layer.index, "v", "g"):
            point = layer.key if keys else layer.value
            names = (name for name, module in plan.loaded.model.named_modules() if point and module is point.module)
            found.append(next(names, layer.name))
    return found


def _capture_here(
    plan: CapturePlan, layers: Sequence[AttentionLayer], sampled: SampleCapture, captures: WorkFolder, done: int
) -> Iterator[int]:
    """Capture the samples from `done` on in parallel; yields how many are captured."""
    loaded, samples, workers = plan.loaded, plan.settings.samples, estimate.capture_workers(plan)

    def run_sample(sample: int) -> None:
        sampled.run(loaded, layers, sample, partial(_write_sample, captures, sample), threads=workers > 1)

    with capturing(loaded, layers, sampled.windows.shape[1], sampled.near):
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

"""Calibrate the streams of a model, each from its captured activations: keys or values of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from kvq_cli.calibration import estimate, mixed, remote, transforms
from kvq_cli.calibration.captured import CapturedStream, ClusterSettings
from kvq_cli.calibration.kinds.base import Calibrated, Progress
from kvq_cli.calibration.parallel import run_parallel
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.distributed import Workers
from kvq_cli.methods.base import Method
from kvq_cli.methods.transform_specs import TransformSpec

if TYPE_CHECKING:
    from kvq_cli.calibration.kinds.capture import CapturePlan

#: Keys and values, as they are called in names of tensors.
KINDS = ("k", "v")
#: A stream: layer, and "k" for keys or "v" for values.
Stream: TypeAlias = tuple[int, str]
#: Calibrates a stream from what was captured of it; made by a function of the stream, and pickled for workers.
StreamFunction: TypeAlias = Callable[[CapturedStream], Any]


def streams_of(plan: CapturePlan) -> list[Stream]:
    """All streams, layer by layer."""
    return [(layer, kind) for layer in plan.loaded.shape.cached_layers for kind in KINDS]


def calibrate_part(
    plan: CapturePlan, work: WorkFolder, captures: WorkFolder, stream: Stream, method: Method
) -> Calibrated:
    """Tensors and errors of a stream that `method` serves; transforms are kept in `work` for its next methods."""
    captured, settings = read_captured(plan, captures, *stream), cluster_settings(plan, stream)

    def transform(spec: TransformSpec) -> transforms.Transform:
        return stored_transform(plan, work, captures, stream, transform_settings(plan, spec, stream[1]))

    return mixed.calibrate_component(captured, method, *stream, plan.loaded.shape, settings, transform)


def transform_settings(plan: CapturePlan, spec: TransformSpec, kind: str) -> transforms.TransformSettings:
    """How the transforms of keys ("k") or values ("v") are fitted."""
    return transforms.TransformSettings.of(spec, kind, plan.loaded.shape, plan.settings.damping)


def stored_transform(
    plan: CapturePlan, work: WorkFolder, captures: WorkFolder, stream: Stream, settings: transforms.TransformSettings
) -> transforms.Transform:
    """The transforms of a stream, fitted once and kept in `work`."""
    step = transform_step(stream, settings)
    if not work.has_tensors(step):
        write_transform(work, step, transforms.fit_transform(read_captured(plan, captures, *stream), settings))
    device = plan.loaded.model.device
    return transforms.Transform(**{key: tensor.to(device) for key, tensor in work.read_tensors(step).items()})


def transform_step(stream: Stream, settings: transforms.TransformSettings) -> str:
    """The name of a stream's transforms in the work folder."""
    weighted = "fisher" if settings.fisher else "plain"
    return f"{stream_name(*stream)}.transform.{settings.groups}.{settings.metric}.{weighted}"


def write_transform(work: WorkFolder, step: str, fitted: transforms.Transform) -> None:
    """Keep a stream's transforms in `work`."""
    work.write_tensors(step, {key: tensor.cpu() for key, tensor in fitted.tensors().items()})


def cluster_all(
    plan: CapturePlan,
    work: WorkFolder,
    captures: WorkFolder,
    cluster: Callable[[Stream], StreamFunction],
    progress: Progress,
    workers: Workers | None,
) -> list[dict[str, Any]]:
    """Cluster every layer's keys and values; returns their errors, by layer."""
    streams = streams_of(plan)
    missing = [stream for stream in streams if work.read_json(stream_name(*stream)) is None]

    def write(stream: Stream, calibrated: Calibrated) -> None:
        tensors, measured = calibrated
        work.write_tensors(stream_name(*stream), {key: tensor.cpu() for key, tensor in tensors.items()})
        work.write_json(stream_name(*stream), measured)  # last: marks the stream as finished

    done = len(streams) - len(missing)
    progress("cluster", done, len(streams))
    for _ in apply_to_streams(plan, captures, cluster, missing, write, workers):
        done += 1
        progress("cluster", done, len(streams))
    return [{kind: work.read_json(stream_name(layer, kind)) for kind in KINDS} for layer in dict(streams)]


def apply_to_streams(
    plan: CapturePlan,
    captures: WorkFolder,
    function: Callable[[Stream], StreamFunction],
    streams: Sequence[Stream],
    write: Callable[[Stream, Any], None],
    workers: Workers | None,
) -> Iterator[None]:
    """Apply each stream's function to what was captured of it, and `write` to the result; yields after each."""

    def run(stream: Stream) -> None:
        write(stream, function(stream)(read_captured(plan, captures, *stream)))

    if workers is None:
        yield from run_parallel(run, streams, estimate.cluster_workers(plan))
        return
    device = plan.loaded.model.device
    tasks = ((stream, function(stream), _read(plan, captures, *stream)) for stream in streams)
    for stream, result in remote.apply_on(workers, device, tasks):
        write(stream, result)
        yield


def read_captured(plan: CapturePlan, captures: WorkFolder, layer: int, kind: str) -> CapturedStream:
    """A stream's captured activations and gradients, on the model's device."""
    return _read(plan, captures, layer, kind).to(plan.loaded.model.device)


def _read(plan: CapturePlan, captures: WorkFolder, layer: int, kind: str) -> CapturedStream:
    settings, shape = plan.settings, plan.loaded.shape
    sample = (plan.capture.tokens, shape.kv_heads, shape.head_dim)
    x = captures.read_samples(stream_name(layer, kind, "x"), (settings.samples, *sample))
    if (captures.read_json("gradients") or {}).get("missing"):
        g = torch.ones(settings.gradients, *sample, dtype=torch.bfloat16)  # nothing is weighted: see `capture_all`
    else:
        g = captures.read_samples(stream_name(layer, kind, "g"), (settings.gradients, *sample))
    return CapturedStream(x, g, settings.held_out)


def cluster_settings(plan: CapturePlan, stream: Stream, fisher: bool = True, hybrid: str = "off") -> ClusterSettings:
    """The settings of a stream's clustering; its seed is the stream's own."""
    settings = plan.settings
    return ClusterSettings(
        fisher=fisher,
        hybrid=hybrid,
        points=settings.points,
        iterations=settings.iterations,
        seed=streams_of(plan).index(stream) + settings.seed * 1_000_003,
        dtype=plan.loaded.shape.torch_dtype,
        damping=settings.damping,
        engine=settings.kmeans,
    )


def stream_name(layer: int, kind: str, quantity: str | None = None) -> str:
    """The name of a stream, or of one of its quantities, in folders and artifacts."""
    return f"{layer}.{kind}" if quantity is None else f"{layer}.{kind}.{quantity}"

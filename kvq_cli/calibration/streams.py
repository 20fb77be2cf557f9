"""Calibrate the streams of a model, each from its captured activations: keys or values of a layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor

from kvq_cli.calibration import estimate, mixed, transforms
from kvq_cli.calibration.captured import CapturedStream, ClusterSettings
from kvq_cli.calibration.codebooks import calibrate_stream
from kvq_cli.calibration.parallel import run_parallel
from kvq_cli.calibration.plan import CapturePlan, CodebookPlan, MixedPlan, TransformPlan
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.methods.base import Method
from kvq_cli.methods.mixed import Mixed

#: Called as progress(phase, done, total) when a phase begins and after each of its steps.
Progress = Callable[[str, int, int], None]
#: Keys and values, as they are called in names of tensors.
KINDS = ("k", "v")
#: A stream: layer, and "k" for keys or "v" for values.
Stream: TypeAlias = tuple[int, str]
#: The tensors of a stream, and their errors as plain JSON values.
Calibrated: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
#: Plans whose streams are calibrated from captured activations.
StreamsPlan: TypeAlias = CodebookPlan | TransformPlan | MixedPlan


def streams_of(plan: CapturePlan) -> list[Stream]:
    """All streams, layer by layer."""
    return [(layer, kind) for layer in range(plan.loaded.shape.layers) for kind in KINDS]


def clustering(plan: CodebookPlan, captures: WorkFolder) -> Callable[[Stream], Calibrated]:
    """The function that clusters a stream's codebooks."""

    def cluster(stream: Stream) -> Calibrated:
        spec = plan.spec.stream(stream[1])
        settings = cluster_settings(plan, stream, plan.spec.fisher, plan.spec.hybrid)
        return calibrate_stream(read_captured(plan, captures, *stream), spec, settings)

    return cluster


def transform_codes(
    plan: TransformPlan, work: WorkFolder, captures: WorkFolder, progress: Progress
) -> Callable[[Stream], Calibrated]:
    """Fit all transforms and give out the codes; returns the function that clusters a stream's codebooks."""
    spec, shape, streams = plan.spec, plan.loaded.shape, streams_of(plan)

    def transform(stream: Stream) -> transforms.Transform:
        return stored_transform(plan, work, captures, stream, spec.groups(stream[1], shape)[0], spec.metric)

    def fit(stream: Stream) -> None:
        transform(stream)

    for done, _ in enumerate(run_parallel(fit, streams, estimate.cluster_workers(plan)), 1):
        progress("transform", done, len(streams))
    lengths = transforms.allocate_codes({stream: transform(stream).variances.cpu() for stream in streams}, spec, shape)

    def cluster(stream: Stream) -> Calibrated:
        captured, settings = read_captured(plan, captures, *stream), cluster_settings(plan, stream, spec.fisher)
        return transforms.calibrate_transform(captured, transform(stream), lengths[stream], settings)

    return cluster


def by_own_method(plan: MixedPlan, work: WorkFolder, captures: WorkFolder) -> Callable[[Stream], Calibrated]:
    """The function that calibrates a stream by its method."""
    method = plan.method
    assert isinstance(method, Mixed)
    return lambda stream: calibrate_part(plan, work, captures, stream, method.component(*stream))


def calibrate_part(
    plan: CapturePlan, work: WorkFolder, captures: WorkFolder, stream: Stream, method: Method
) -> Calibrated:
    """Tensors and errors of a stream that `method` serves; transforms are kept in `work` for its next methods."""
    captured, settings = read_captured(plan, captures, *stream), cluster_settings(plan, stream)

    def transform(groups: int, metric: str) -> transforms.Transform:
        return stored_transform(plan, work, captures, stream, groups, metric)

    return mixed.calibrate_component(captured, method, *stream, plan.loaded.shape, settings, transform)


def stored_transform(
    plan: CapturePlan, work: WorkFolder, captures: WorkFolder, stream: Stream, groups: int, metric: str
) -> transforms.Transform:
    """The transforms of a stream, fitted once and kept in `work`."""
    step = f"{stream_name(*stream)}.transform.{groups}.{metric}"
    if not work.has_tensors(step):
        fitted = transforms.fit_transform(read_captured(plan, captures, *stream), groups, metric)
        work.write_tensors(step, {key: tensor.cpu() for key, tensor in fitted.tensors().items()})
    device = plan.loaded.model.device
    return transforms.Transform(**{key: tensor.to(device) for key, tensor in work.read_tensors(step).items()})


def cluster_all(
    plan: StreamsPlan,
    work: WorkFolder,
    cluster: Callable[[Stream], Calibrated],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Cluster every layer's keys and values; returns their errors, by layer."""
    streams = streams_of(plan)
    missing = [stream for stream in streams if work.read_json(stream_name(*stream)) is None]

    def run(stream: Stream) -> None:
        tensors, measured = cluster(stream)
        work.write_tensors(stream_name(*stream), {key: tensor.cpu() for key, tensor in tensors.items()})
        work.write_json(stream_name(*stream), measured)  # last: marks the stream as finished

    done = len(streams) - len(missing)
    progress("cluster", done, len(streams))
    for _ in run_parallel(run, missing, estimate.cluster_workers(plan)):
        done += 1
        progress("cluster", done, len(streams))
    return [{kind: work.read_json(stream_name(layer, kind)) for kind in KINDS} for layer in range(len(streams) // 2)]


def read_captured(plan: CapturePlan, captures: WorkFolder, layer: int, kind: str) -> CapturedStream:
    """A stream's captured activations and gradients, on the model's device."""
    settings, shape, device = plan.settings, plan.loaded.shape, plan.loaded.model.device
    sample = (plan.capture.tokens, shape.kv_heads, shape.head_dim)
    x = captures.read_samples(stream_name(layer, kind, "x"), (settings.samples, *sample)).to(device)
    g = captures.read_samples(stream_name(layer, kind, "g"), (settings.gradients, *sample)).to(device)
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
        dtype=plan.loaded.shape.dtype,
        damping=settings.damping,
        engine=settings.kmeans,
    )


def stream_name(layer: int, kind: str, quantity: str | None = None) -> str:
    """The name of a stream, or of one of its quantities, in folders and artifacts."""
    return f"{layer}.{kind}" if quantity is None else f"{layer}.{kind}.{quantity}"

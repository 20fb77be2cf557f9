"""Run a calibration in resumable steps: text -> captured activations -> codebooks -> artifact, or weights -> factors ->
artifact."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor

from kvq_cli.artifact import Artifact, check_replaceable, load_artifact, save_artifact
from kvq_cli.artifact.contents import tensor_sizes
from kvq_cli.attention.capture_points import AttentionLayer, attention_layers
from kvq_cli.calibration import capture, estimate, factors, low_rank, mixed, transforms
from kvq_cli.calibration.captured import CapturedStream, ClusterSettings
from kvq_cli.calibration.card import card
from kvq_cli.calibration.codebooks import ERROR_MEASURE, calibrate_stream
from kvq_cli.calibration.parallel import deterministic, run_parallel
from kvq_cli.calibration.plan import (
    AnyPlan,
    CapturePlan,
    CodebookPlan,
    FactorPlan,
    MixedPlan,
    TransformPlan,
    WhitenedPlan,
)
from kvq_cli.calibration.settings import CaptureSize, calibrate_command
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.data.texts import SELF, load_text, sampled_windows, token_windows
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.base import LowRankSpec, Method
from kvq_cli.methods.mixed import Mixed

#: Called as progress(phase, done, total) when a phase begins and after each of its steps.
Progress = Callable[[str, int, int], None]
#: Keys and values, as they are called in names of tensors.
_KINDS = ("k", "v")
#: A stream: layer, and "k" for keys or "v" for values.
Stream: TypeAlias = tuple[int, str]
#: The tensors of a stream, and their errors as plain JSON values.
_Calibrated: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]
_StreamsPlan: TypeAlias = CodebookPlan | TransformPlan | MixedPlan


def calibrate(
    plan: AnyPlan,
    out: Path,
    *,
    resume: bool = False,
    force: bool = False,
    captured: Path | None = None,
    progress: Progress = lambda *_: None,
) -> Artifact:
    """Calibrate and write the artifact to `out`. Finished steps are kept in `<out>.work` until the end.

    An interruption (also a kill) leaves that folder, and `resume` continues from it to the same bytes; a failure
    removes it, unless it was resumed. captured: folder in which captured activations are kept, for other calibrations
    that capture the same.
    Raises UsageError where `out` or the folder exists and neither `resume` nor `force` is given, KvqError where another
    process uses the folder.
    """
    request = plan.request()
    with closing(WorkFolder(out.with_name(out.name + ".work"))) as work:
        if force:
            work.clear()
        elif out.exists() and resume and not work.path.exists():
            return _load_finished(out, request)
        check_replaceable(out, overwrite=force or resume)
        work.open(request, resume=resume, disk_bytes=0 if captured else estimate.disk_bytes(plan))
        try:
            with deterministic(plan.loaded.model.device):
                if isinstance(plan, FactorPlan):
                    tensors, measured = _factorize_all(plan, work, progress)
                else:
                    with captures_folder(plan, work, captured) as captures:
                        capture_all(plan, captures, progress)
                        tensors, measured = _make_codebooks(plan, work, captures, progress)
            artifact = _write(plan, out, tensors, measured, progress)
        except (KvqError, OSError):
            if not resume:  # the steps that earlier runs finished are not this failure's to remove
                work.remove()
            raise
        work.remove()
    return artifact


def _load_finished(out: Path, request: dict[str, Any]) -> Artifact:
    artifact = load_artifact(out)
    different = [key for key in request if artifact.config.get(key) != request[key]]
    if different:
        raise UsageError(
            f"{out} was made with another {', '.join(different)}: choose another --out, or replace it with --force"
        )
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


def _factorized(plan: FactorPlan, work: WorkFolder, layer: AttentionLayer, names: tuple[str, ...]) -> _Calibrated:
    """The factors of a layer's weights, and their errors."""
    if not isinstance(plan.spec, LowRankSpec):
        return factors.factorize(layer, names, plan.loaded.shape.dtype)
    moments = work.read_tensors(f"{layer.index}.moments") if plan.spec.whiten else None
    return low_rank.factorize_groups(layer, plan.spec, plan.loaded.shape, moments)


def _second_moments(plan: WhitenedPlan, work: WorkFolder, layers: Sequence[AttentionLayer], progress: Progress) -> None:
    """Write the second moments of what W_k and W_v give on the text, by layer."""
    windows = _windows(plan, work, progress)
    progress("read activations", 0, len(windows))
    if not work.has_tensors(f"{layers[-1].index}.moments"):  # the last that is written
        with low_rank.SecondMoments(layers, plan.spec, plan.loaded.shape) as moments:
            for done, window in enumerate(windows):
                capture.forward(plan.loaded.model, window)
                progress("read activations", done + 1, len(windows))
        for layer, found in moments.by_layer().items():
            work.write_tensors(f"{layer}.moments", {kind: moment.cpu() for kind, moment in found.items()})
    progress("read activations", len(windows), len(windows))


@contextmanager
def captures_folder(plan: CapturePlan, work: WorkFolder, captured: Path | None) -> Iterator[WorkFolder]:
    """The folder of the captured activations: `work`, or one below `captured`, named by what it depends on."""
    if captured is None:
        yield work
        return
    request = plan.capture_request()
    name = sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:16]
    with closing(WorkFolder(captured / name)) as captures:
        captures.open(request, resume=True, disk_bytes=plan.capture.nbytes)
        yield captures


def _make_codebooks(
    plan: _StreamsPlan, work: WorkFolder, captures: WorkFolder, progress: Progress
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Codebooks of every layer's keys and values: the artifact's tensors, and their errors."""
    if isinstance(plan, CodebookPlan):
        cluster, measure = _clustering(plan, captures), ERROR_MEASURE
    elif isinstance(plan, TransformPlan):
        cluster, measure = _transforms(plan, work, captures, progress), transforms.ERROR_MEASURE
    else:
        cluster, measure = _mixed(plan, work, captures), mixed.ERROR_MEASURE
    errors = _cluster_all(plan, work, cluster, progress)
    tensors = {
        f"layers.{_name(layer, kind)}.{key}": tensor
        for layer in range(plan.loaded.shape.layers)
        for kind in _KINDS
        for key, tensor in work.read_tensors(_name(layer, kind)).items()
    }
    return tensors, {"captured": captured_tokens(plan), "errors": {"measure": measure, "layers": errors}}


def captured_tokens(plan: CapturePlan) -> dict[str, int]:
    """The entry `captured` of an artifact's config."""
    return {
        "tokens": plan.capture.tokens * plan.settings.samples,
        "tokens_with_gradients": plan.capture.tokens * plan.settings.gradients,
        "tokens_held_out": plan.capture.tokens * plan.settings.held_out,
    }


def capture_all(plan: CapturePlan, captures: WorkFolder, progress: Progress) -> None:
    """Run every sample through the model, and write its captured tokens to disk before the next ones run."""
    settings, loaded = plan.settings, plan.loaded
    windows = _windows(plan, captures, progress)
    done = (captures.read_json("captured") or {"samples": 0})["samples"]
    progress("capture", done, settings.samples)
    if done == settings.samples:
        return
    layers = attention_layers(loaded.model)
    workers = estimate.capture_workers(plan)

    def run_sample(sample: int) -> None:
        tokens = _captured_tokens(plan.capture, settings.seed, sample)

        def write(layer: int, kind: str, quantity: str, numbers: Tensor) -> None:
            numbers = numbers[tokens.to(numbers.device)].to("cpu", torch.bfloat16).contiguous()
            captures.write_sample(_name(layer, kind, quantity), sample, numbers)

        gradients = sample < settings.gradients
        capture.capture(loaded.model, layers, windows[sample], write, gradients=gradients, threads=workers > 1)

    checkpointing = capture.gradient_checkpointing(loaded.model, estimate.needs_checkpointing(loaded, settings.seqlen))
    with checkpointing, capture.blocked_attention_on_cpu(loaded.model, layers):
        while done < settings.samples:
            # A batch ends before the next one starts, so that the samples counted as done have no gaps.
            batch = range(done, min(done + workers, settings.samples))
            for _ in run_parallel(run_sample, batch, workers):
                done += 1
                progress("capture", done, settings.samples)
            captures.write_json("captured", {"samples": done})


def _windows(plan: CapturePlan | WhitenedPlan, captures: WorkFolder, progress: Progress) -> Tensor:
    """The samples, int64 `[samples, seqlen]`; stored, since sampling text from the model takes long."""
    progress("read text", 0, 1)
    if not captures.has_tensors("windows"):
        settings, loaded = plan.settings, plan.loaded
        seqlen, samples, seed = settings.seqlen, settings.samples, settings.seed
        if settings.dataset == SELF:
            windows = sampled_windows(loaded.model, loaded.tokenizer, seqlen, samples, seed)
        else:
            text = load_text(settings.dataset, "calibration")
            windows = token_windows(loaded.tokenizer, text, seqlen, samples, seed)
        captures.write_tensors("windows", {"windows": windows})
    progress("read text", 1, 1)
    return captures.read_tensors("windows")["windows"]


def _captured_tokens(size: CaptureSize, seed: int, sample: int) -> Tensor:
    """Indices of a sample's captured tokens: all after the sinks, or as many random units as the budget allows."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + sample)
    units = torch.randperm(size.possible, generator=generator)[: size.units].sort().values
    return (size.skip + units[:, None] * size.unit + torch.arange(size.unit)).flatten()


def _streams(plan: CapturePlan) -> list[Stream]:
    return [(layer, kind) for layer in range(plan.loaded.shape.layers) for kind in _KINDS]


def _clustering(plan: CodebookPlan, captures: WorkFolder) -> Callable[[Stream], _Calibrated]:
    """The function that clusters a stream's codebooks."""

    def cluster(stream: Stream) -> _Calibrated:
        spec = plan.spec.keys if stream[1] == "k" else plan.spec.values
        settings = cluster_settings(plan, stream, plan.spec.fisher, plan.spec.hybrid)
        return calibrate_stream(read_captured(plan, captures, *stream), spec, settings)

    return cluster


def _transforms(
    plan: TransformPlan, work: WorkFolder, captures: WorkFolder, progress: Progress
) -> Callable[[Stream], _Calibrated]:
    """Fit all transforms and give out the codes; returns the function that clusters a stream's codebooks."""
    spec, shape, streams = plan.spec, plan.loaded.shape, _streams(plan)

    def step(stream: Stream) -> str:
        return f"{_name(*stream)}.transform"

    def fit(stream: Stream) -> None:
        groups, _ = spec.groups(stream[1], shape)
        fitted = transforms.fit_transform(read_captured(plan, captures, *stream), groups, spec.metric)
        work.write_tensors(step(stream), {key: tensor.cpu() for key, tensor in fitted.tensors().items()})

    missing = [stream for stream in streams if not work.has_tensors(step(stream))]
    for done, _ in enumerate(run_parallel(fit, missing, estimate.cluster_workers(plan)), len(streams) - len(missing)):
        progress("transform", done + 1, len(streams))
    lengths = transforms.allocate_codes(
        {stream: work.read_tensors(step(stream))["variances"] for stream in streams}, spec, shape
    )

    def cluster(stream: Stream) -> _Calibrated:
        captured = read_captured(plan, captures, *stream)
        fitted = {key: tensor.to(captured.x.device) for key, tensor in work.read_tensors(step(stream)).items()}
        settings = cluster_settings(plan, stream, spec.fisher)
        return transforms.calibrate_transform(captured, transforms.Transform(**fitted), lengths[stream], settings)

    return cluster


def _mixed(plan: MixedPlan, work: WorkFolder, captures: WorkFolder) -> Callable[[Stream], _Calibrated]:
    """The function that calibrates a stream by its method."""
    method = plan.method
    assert isinstance(method, Mixed)
    return lambda stream: calibrate_part(plan, work, captures, stream, method.component(*stream))


def calibrate_part(
    plan: CapturePlan, work: WorkFolder, captures: WorkFolder, stream: Stream, method: Method
) -> _Calibrated:
    """Tensors and errors of a stream that `method` serves; transforms are kept in `work` for its next methods."""
    captured, settings = read_captured(plan, captures, *stream), cluster_settings(plan, stream)

    def transform(groups: int, metric: str) -> transforms.Transform:
        return stored_transform(plan, work, captures, stream, groups, metric)

    return mixed.calibrate_component(captured, method, *stream, plan.loaded.shape, settings, transform)


def stored_transform(
    plan: CapturePlan, work: WorkFolder, captures: WorkFolder, stream: Stream, groups: int, metric: str
) -> transforms.Transform:
    """The transforms of a stream, fitted once and kept in `work`."""
    step = f"{_name(*stream)}.transform.{groups}.{metric}"
    if not work.has_tensors(step):
        fitted = transforms.fit_transform(read_captured(plan, captures, *stream), groups, metric)
        work.write_tensors(step, {key: tensor.cpu() for key, tensor in fitted.tensors().items()})
    device = plan.loaded.model.device
    return transforms.Transform(**{key: tensor.to(device) for key, tensor in work.read_tensors(step).items()})


def _cluster_all(
    plan: _StreamsPlan,
    work: WorkFolder,
    cluster: Callable[[Stream], _Calibrated],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Cluster every layer's keys and values; returns their errors, by layer."""
    streams = _streams(plan)
    missing = [stream for stream in streams if work.read_json(_name(*stream)) is None]

    def run(stream: Stream) -> None:
        tensors, measured = cluster(stream)
        work.write_tensors(_name(*stream), {key: tensor.cpu() for key, tensor in tensors.items()})
        work.write_json(_name(*stream), measured)  # last: marks the stream as finished

    done = len(streams) - len(missing)
    progress("cluster", done, len(streams))
    for _ in run_parallel(run, missing, estimate.cluster_workers(plan)):
        done += 1
        progress("cluster", done, len(streams))
    return [{kind: work.read_json(_name(layer, kind)) for kind in _KINDS} for layer in range(len(streams) // 2)]


def read_captured(plan: CapturePlan, captures: WorkFolder, layer: int, kind: str) -> CapturedStream:
    """A stream's captured activations and gradients, on the model's device."""
    settings, shape, device = plan.settings, plan.loaded.shape, plan.loaded.model.device
    sample = (plan.capture.tokens, shape.kv_heads, shape.head_dim)
    x = captures.read_samples(_name(layer, kind, "x"), (settings.samples, *sample)).to(device)
    g = captures.read_samples(_name(layer, kind, "g"), (settings.gradients, *sample)).to(device)
    return CapturedStream(x, g, settings.held_out)


def cluster_settings(plan: CapturePlan, stream: Stream, fisher: bool = True, hybrid: str = "off") -> ClusterSettings:
    """The settings of a stream's clustering; its seed is the stream's own."""
    settings = plan.settings
    return ClusterSettings(
        fisher=fisher,
        hybrid=hybrid,
        points=settings.points,
        iterations=settings.iterations,
        seed=_streams(plan).index(stream) + settings.seed * 1_000_003,
        dtype=plan.loaded.shape.dtype,
        damping=settings.damping,
        engine=settings.kmeans,
    )


def _write(
    plan: AnyPlan,
    out: Path,
    tensors: dict[str, Tensor],
    measured: dict[str, Any],
    progress: Progress,
) -> Artifact:
    progress("write", 0, 1)
    config = {**plan.request(), "versions": versions(plan), "sizes": tensor_sizes(tensors), **measured}
    command = calibrate_command(plan.method, plan.loaded, plan.settings_dict())
    artifact = save_artifact(out, config, tensors, card(config, command), overwrite=True)
    progress("write", 1, 1)
    return artifact


def versions(plan: AnyPlan) -> dict[str, str]:
    """Versions of the libraries that computed the tensors."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if isinstance(plan, CapturePlan) and plan.settings.kmeans == "faiss":
        import faiss

        versions["faiss"] = faiss.__version__
    return versions


def _name(layer: int, kind: str, quantity: str | None = None) -> str:
    return f"{layer}.{kind}" if quantity is None else f"{layer}.{kind}.{quantity}"

"""Calibrate a method for a model, each step resumable: text -> captured numbers -> codebooks -> artifact, or weights ->
factors -> artifact."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import transformers
from torch import Tensor

import kvq_cli
from kvq_cli.artifact import Artifact, check_replaceable, fingerprint, load_artifact, save_artifact
from kvq_cli.attention.capture_points import attention_layers
from kvq_cli.calibration import capture, estimate, factors
from kvq_cli.calibration.card import card
from kvq_cli.calibration.codebooks import ERROR_MEASURE, CapturedStream, ClusterSettings, calibrate_stream
from kvq_cli.calibration.kmeans import choose_engine
from kvq_cli.calibration.parallel import deterministic, run_parallel
from kvq_cli.calibration.settings import Extent, Settings, calibrate_command, extent
from kvq_cli.calibration.work_folder import WorkFolder
from kvq_cli.data.texts import SELF, load_text, sampled_windows, token_windows
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.methods.base import CalibrationSpec, FactorSpec, Method
from kvq_cli.methods.registry import to_config
from kvq_cli.models import LoadedModel

#: Called as progress(phase, done, total) when a phase begins and after each of its units.
Progress = Callable[[str, int, int], None]
_STREAMS = ("k", "v")


@dataclass(frozen=True)
class Plan:
    """Everything that is settled before the model runs. extent: None where no text is read."""

    loaded: LoadedModel
    method: Method
    settings: Settings
    spec: CalibrationSpec | FactorSpec
    extent: Extent | None

    def request(self) -> dict:
        """What makes two calibrations the same one; stands in `config.json` too."""
        loaded = self.loaded
        return {
            "kvq": kvq_cli.__version__,
            "method": to_config(self.method),
            "model": {
                "name": loaded.name,
                "revision": loaded.revision,
                "dtype": str(loaded.shape.dtype).removeprefix("torch."),
                "fingerprint": fingerprint(loaded.model).to_dict(),
            },
            "calibration": {} if self.extent is None else self.settings.to_dict(),
        }


def plan(loaded: LoadedModel, method: Method, settings: Settings) -> Plan:
    """Check what is asked for, and fill in the defaults.

    UsageError for bits, head_dim, budgets and sizes that cannot work; KvqError where a package is missing.
    """
    spec = method.calibration(loaded.shape)
    if isinstance(spec, FactorSpec):
        return Plan(loaded, method, settings, spec, None)
    entries = max(spec.keys.entries, spec.values.entries)
    settings = replace(settings.resolved(loaded), kmeans=choose_engine(settings.kmeans, entries))
    unit = math.lcm(2, *(shape.tokens for stream in (spec.keys, spec.values) for shape in stream.shapes))
    return Plan(loaded, method, settings, spec, extent(settings, spec, unit, loaded))


def calibrate(
    planned: Plan, out: Path, *, resume: bool = False, force: bool = False, progress: Progress = lambda *_: None
) -> Artifact:
    """Make the artifact `out`. What is done lies in `<out>.work` until the end.

    An interruption (also a kill) leaves that folder, and `resume` goes on from it to the same bytes; a failure removes
    it. Raises UsageError where `out` or the folder exists and neither `resume` nor `force` is given, KvqError where
    another process is at work in the folder.
    """
    request = planned.request()
    with closing(WorkFolder(out)) as work:
        if force:
            work.clear()
        elif out.exists() and resume and not work.path.exists():
            return _finished(out, request)
        check_replaceable(out, overwrite=force or resume)
        work.open(request, resume=resume, room=estimate.work_bytes(planned))
        make = _factorize_all if planned.extent is None else _make_codebooks
        try:
            with deterministic(planned.loaded.model.device):
                tensors, measured = make(planned, work, progress)
            artifact = _write(planned, out, tensors, measured, progress)
        except (KvqError, OSError):
            work.remove()
            raise
        work.remove()
    return artifact


def _finished(out: Path, request: dict) -> Artifact:
    artifact = load_artifact(out)
    different = [key for key in request if artifact.config.get(key) != request[key]]
    if different:
        raise UsageError(
            f"{out} was made with another {', '.join(different)}: choose another --out, or replace it with --force"
        )
    return artifact


def _factorize_all(planned: Plan, work: WorkFolder, progress: Progress) -> tuple[dict[str, Tensor], dict]:
    """Factors of every layer's weights; gives the artifact's tensors and what was measured."""
    layers = planned.spec.layers
    progress("factorize", 0, len(layers))
    sites, tensors, measured = attention_layers(planned.loaded.model), {}, []
    for site, names in zip(sites, layers, strict=True):
        if work.read_json(part := f"{site.index}.factors") is None:
            found, errors = factors.factorize(site, names, planned.loaded.shape.dtype)
            work.write_tensors(part, {key: tensor.cpu() for key, tensor in found.items()})
            work.write_json(part, errors)  # last: it says that both are there
        tensors |= {f"layers.{site.index}.{key}": tensor for key, tensor in work.read_tensors(part).items()}
        measured.append(work.read_json(part))
        progress("factorize", site.index + 1, len(layers))
    return tensors, {"errors": {"measure": factors.ERROR_MEASURE, "layers": measured}}


def _make_codebooks(planned: Plan, work: WorkFolder, progress: Progress) -> tuple[dict[str, Tensor], dict]:
    """Codebooks of every layer's keys and values; gives the artifact's tensors and what was measured."""
    _capture_all(planned, work, progress)
    errors = _cluster_all(planned, work, progress)
    tensors = {
        f"layers.{_name(layer, kind)}.{key}": tensor
        for layer in range(planned.loaded.shape.layers)
        for kind in _STREAMS
        for key, tensor in work.read_tensors(_name(layer, kind)).items()
    }
    kept, settings = planned.extent, planned.settings
    captured = {
        "tokens": kept.tokens * settings.samples,
        "tokens_with_gradients": kept.tokens * settings.gradients,
        "tokens_held_out": kept.tokens * settings.held_out,
    }
    return tensors, {"captured": captured, "errors": {"measure": ERROR_MEASURE, "layers": errors}}


def _capture_all(planned: Plan, work: WorkFolder, progress: Progress) -> None:
    """Run every sample through the model; its kept numbers go to disk before the next one runs."""
    settings, loaded, kept = planned.settings, planned.loaded, planned.extent
    windows = _windows(planned, work, progress)
    done = (work.read_json("captured") or {"samples": 0})["samples"]
    progress("capture", done, settings.samples)
    if done == settings.samples:
        return
    sites = attention_layers(loaded.model)
    workers = estimate.capture_workers(planned)

    def pass_through(sample: int) -> None:
        tokens = _kept_tokens(kept, settings.seed, sample)

        def sink(layer: int, kind: str, what: str, numbers: Tensor) -> None:
            numbers = numbers[tokens.to(numbers.device)].to("cpu", torch.bfloat16).contiguous()
            work.write_numbers(_name(layer, kind, what), sample, numbers)

        gradients = sample < settings.gradients
        capture.capture(loaded.model, sites, windows[sample], sink, gradients=gradients, shared=workers > 1)

    checkpointing = capture.gradient_checkpointing(loaded.model, estimate.needs_checkpointing(loaded, settings))
    with checkpointing, capture.blocked_attention_on_cpu(loaded.model, sites):
        while done < settings.samples:
            # All of them before the next ones: what is noted as done has no gaps.
            together = range(done, min(done + workers, settings.samples))
            for _ in run_parallel(pass_through, together, workers):
                done += 1
                progress("capture", done, settings.samples)
            work.write_json("captured", {"samples": done})


def _windows(planned: Plan, work: WorkFolder, progress: Progress) -> Tensor:
    """The samples, `[samples, seqlen]`; kept, since sampling from the model takes its time."""
    progress("read text", 0, 1)
    stored = work.read_tensors("windows")
    if stored is None:
        settings, loaded = planned.settings, planned.loaded
        size, samples, seed = settings.seqlen, settings.samples, settings.seed
        if settings.dataset == SELF:
            windows = sampled_windows(loaded.model, loaded.tokenizer, size, samples, seed)
        else:
            text = load_text(settings.dataset, "calibration")
            windows = token_windows(loaded.tokenizer, text, size, samples, seed)
        stored = {"windows": windows}
        work.write_tensors("windows", stored)
    progress("read text", 1, 1)
    return stored["windows"]


def _kept_tokens(kept: Extent, seed: int, sample: int) -> Tensor:
    """Which tokens of a sample are kept: all after the sinks, or as many whole units as the budget allows."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + sample)
    units = torch.randperm(kept.possible, generator=generator)[: kept.units].sort().values
    return (kept.skip + units[:, None] * kept.unit + torch.arange(kept.unit)).flatten()


def _cluster_all(planned: Plan, work: WorkFolder, progress: Progress) -> list[dict]:
    """Codebooks of every layer's keys and values; gives the measured errors, by layer."""
    streams = [(layer, kind) for layer in range(planned.loaded.shape.layers) for kind in _STREAMS]
    missing = [stream for stream in streams if work.read_json(_name(*stream)) is None]

    def cluster(stream: tuple[int, str]) -> None:
        layer, kind = stream
        spec = planned.spec.keys if kind == "k" else planned.spec.values
        captured = _read_captured(planned, work, layer, kind)
        tensors, measured = calibrate_stream(captured, spec, _recipe(planned, seed=streams.index(stream)))
        work.write_tensors(_name(layer, kind), {key: tensor.cpu() for key, tensor in tensors.items()})
        work.write_json(_name(layer, kind), measured)  # last: it says that both are there

    done = len(streams) - len(missing)
    progress("cluster", done, len(streams))
    for _ in run_parallel(cluster, missing, estimate.cluster_workers(planned)):
        done += 1
        progress("cluster", done, len(streams))
    return [{kind: work.read_json(_name(layer, kind)) for kind in _STREAMS} for layer in range(len(streams) // 2)]


def _read_captured(planned: Plan, work: WorkFolder, layer: int, kind: str) -> CapturedStream:
    settings, shape, device = planned.settings, planned.loaded.shape, planned.loaded.model.device
    numbers = (planned.extent.tokens, shape.kv_heads, shape.head_dim)
    x = work.read_numbers(_name(layer, kind, "x"), (settings.samples, *numbers)).to(device)
    g = work.read_numbers(_name(layer, kind, "g"), (settings.gradients, *numbers)).to(device)
    return CapturedStream(x, g, settings.held_out)


def _recipe(planned: Plan, seed: int) -> ClusterSettings:
    settings, spec = planned.settings, planned.spec
    seed += settings.seed * 1_000_003
    dtype = planned.loaded.shape.dtype
    return ClusterSettings(
        fisher=spec.fisher,
        hybrid=spec.hybrid,
        points=settings.points,
        iterations=settings.iterations,
        seed=seed,
        dtype=dtype,
        damping=settings.damping,
        engine=settings.kmeans,
    )


def _write(planned: Plan, out: Path, tensors: dict[str, Tensor], measured: dict, progress: Progress) -> Artifact:
    progress("write", 0, 1)
    config = {**planned.request(), "versions": _versions(planned), "sizes": sizes(tensors), **measured}
    settings = None if planned.extent is None else planned.settings
    command = calibrate_command(planned.method, planned.loaded.name, settings)
    artifact = save_artifact(out, config, tensors, card(config, command), overwrite=True)
    progress("write", 1, 1)
    return artifact


def _versions(planned: Plan) -> dict[str, str]:
    """Versions of the libraries that computed the tensors."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    if planned.extent is not None and planned.settings.kmeans == "faiss":
        import faiss

        versions["faiss"] = faiss.__version__
    return versions


def sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Bytes per kind of tensor ("k.centroids", "v.mean", ...) and in total."""
    found: dict[str, int] = {}
    for name in sorted(tensors):
        _, _, stream, what = name.split(".")[:4]
        kind = f"{stream}.{what}"
        found[kind] = found.get(kind, 0) + tensors[name].numel() * tensors[name].element_size()
    return found | {"total": sum(found.values())}


def _name(layer: int, kind: str, what: str | None = None) -> str:
    return f"{layer}.{kind}" if what is None else f"{layer}.{kind}.{what}"

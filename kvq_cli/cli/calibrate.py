"""`kvq calibrate`: calibrate a method for a model and write its artifact."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.option_groups import grouped
from kvq_cli.cli.output import Output, human_bytes
from kvq_cli.cli.rules import Rule, Values, either, unless
from kvq_cli.errors import UsageError, WorkerDiedError
from kvq_cli.paths import artifact_folder

if TYPE_CHECKING:
    from kvq_cli.artifact import Artifact
    from kvq_cli.calibration.kinds.base import CalibrationPlan
    from kvq_cli.calibration.settings import CalibrationOptions
    from kvq_cli.methods.base import Method

data_option = partial(typer.Option, rich_help_panel="Calibration")

Out = Annotated[
    Path | None, data_option("--out", metavar="DIR", help=f"Output folder (default: {opt.DEFAULT_ARTIFACT}).")
]
Dataset = Annotated[
    str,
    data_option(
        "--dataset",
        metavar="NAME",
        help="Calibration text: prose, pydoc, self (offline), wikitext2, c4, ptb or a file (.txt, .jsonl[:FIELD]).",
    ),
]
Samples = Annotated[
    int | None, data_option("--samples", min=2, help="Number of text windows (default: 131,072 tokens in all).")
]
Seqlen = Annotated[
    int | None,
    data_option("--seqlen", min=1, help="Tokens per window (default: 2048, at most the model's context length)."),
]
Gradients = Annotated[
    int | None, data_option("--gradients", min=2, help="Number of windows with gradients (default: all).")
]
Points = Annotated[
    int,
    data_option("--points", min=256, help="Training points of each codebook; entries=65536: 256 times as many."),
]
Iterations = Annotated[int, data_option("--iterations", min=1, help="Maximum number of k-means iterations.")]
Kmeans = Annotated[
    Literal["auto", "kvq", "faiss"],
    data_option(
        "--kmeans",
        help="K-means engine; auto: faiss, if installed, for codebooks of more than 1,024 entries, else kvq.",
    ),
]
Damping = Annotated[
    float,
    data_option(
        "--damping", min=0.0, help="Fraction of the mean Fisher weight that is added to each weight; 0: no damping."
    ),
]
Disk = Annotated[
    float,
    data_option(
        "--disk",
        metavar="GIB",
        help="Disk space for captured keys and values in GiB; if they need more, a random sample is kept.",
    ),
]
Captured = Annotated[
    Path | None,
    data_option(
        "--captured",
        metavar="DIR",
        help="Keep the captured keys, values and gradients in this folder: calibrations of the same model, text and "
        "sizes then capture once.",
    ),
]
Fisher = Annotated[
    bool, data_option("--fisher/--no-fisher", help="Weight k-means by squared gradients (diagonal Fisher information).")
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")]
Force = Annotated[
    bool, typer.Option("--force", help="Overwrite an existing artifact; without --resume, also an unfinished run.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print tensors, bytes and expected memory, without calibrating.")
]


def build_method(method: str | None, bits: float | None, set_: list[str] | None, fisher: bool = True) -> Method:
    """The method to calibrate, with its options; UsageError for wrong ones."""
    from kvq_cli.methods.registry import build

    given = opt.method_options(set_) | ({} if bits is None else {"bits": bits}) | ({} if fisher else {"fisher": False})
    return build(method or "temporalkv", **given)


def _method(values: Values) -> Method:
    return build_method(values["method"], values["bits"], values["set_"])


def _calibration(values: Values) -> Any:
    """How the method is calibrated: what it reads and captures is the same for all models."""
    from kvq_cli.benchmarking.shapes import SHAPES

    return _method(values).calibration(SHAPES["llama-3.1-8b"].model_shape())


def _captures(values: Values) -> bool:
    """Whether keys, values and gradients are captured on text, to cluster them."""
    return _calibration(values).captures


def _weighted(values: Values) -> bool:
    """Whether k-means is weighted by squared gradients."""
    return _captures(values) and values["fisher"] and getattr(_method(values), "fisher", True)


def _runs(what: str) -> Rule:
    return unless(lambda values: not values["dry_run"], f"--dry-run {what} nothing")


only_text = unless(lambda values: _calibration(values).reads_text, "the method factorizes weights and reads no text")
_clusters = either(only_text, unless(_captures, "the method factorizes weights and clusters nothing"))
_writes = _runs("writes")
_workers = either(unless(_captures, "the method factorizes weights, in one process"), _runs("runs"))


@dataclass(frozen=True)
class DataOptions:
    """Calibration text and sizes, and what becomes of existing files."""

    out: Annotated[Out, _writes] = None
    dataset: Annotated[Dataset, only_text] = "prose"
    samples: Annotated[Samples, only_text] = None
    seqlen: Annotated[Seqlen, only_text] = None
    gradients: Annotated[Gradients, _clusters] = None
    points: Annotated[Points, _clusters] = 8192
    iterations: Annotated[Iterations, _clusters] = 50
    kmeans: Annotated[Kmeans, _clusters] = "auto"
    damping: Annotated[Damping, either(only_text, unless(_weighted, "k-means is not weighted by gradients"))] = 0.1
    captured: Annotated[Captured, either(_clusters, _runs("captures"))] = None
    resume: Annotated[Resume, _writes] = False
    force: Annotated[Force, _writes] = False

    def options(self, disk_gib: float, seed: int) -> CalibrationOptions:
        """The options of `plan_calibration`; disk_gib: space for captured keys and values."""
        from kvq_cli.calibration.settings import CalibrationOptions

        sizes = (self.dataset, self.samples, self.seqlen, self.gradients, self.points, self.iterations)
        return CalibrationOptions(*sizes, self.damping, disk_gib, seed, self.kmeans)

    def folder(self, default: Path) -> Path:
        """`--out`, or the default. UsageError for `.` and `/`: the folder appears complete, by being renamed."""
        if self.out is not None and not self.out.name:
            raise UsageError(f"--out {self.out}: give the name of a new folder, like --out mine")
        return self.out or default

    @contextmanager
    def resumable(self, output: Output) -> Iterator[dict[str, Any]]:
        """Arguments of a resumable run, with its progress; Ctrl-C inside the block prints how to continue."""
        try:
            with output.phases() as progress:
                kept = {"resume": self.resume, "force": self.force, "captured": self.captured}
                yield {**kept, "progress": progress, "note": output.note}
        except KeyboardInterrupt:
            output.note("interrupted; continue with the same command and --resume")
            raise
        except WorkerDiedError:
            output.note("finished steps are kept; continue with the same command and --resume")
            raise


@dataclass(frozen=True)
class _ModelOptions(opt.LoadOptions):
    """The model, and the seed of the text's windows."""

    seed: Annotated[opt.Seed, only_text] = 0


@grouped
def calibrate(
    *,
    method: opt.MethodName = "temporalkv",
    bits: opt.Bits = None,
    set_: opt.Set = None,
    data: DataOptions,
    disk: Annotated[Disk, _clusters] = 4.0,
    fisher: Fisher = True,
    dry_run: DryRun = False,
    worker_options: Annotated[opt.WorkerOptions, _workers],
    model_options: _ModelOptions,
    output_options: opt.OutputOptions,
) -> None:
    """Calibrate a method for a model: capture keys, values and gradients, fit codebooks or transforms, and write
    an artifact.

    After Ctrl-C, the same command with --resume continues.
    """
    output = output_options.output()
    plan, folder = planned(build_method(method, bits, set_, fisher), data, disk, model_options)
    if dry_run:
        from kvq_cli.calibration.estimate import dry_run_report

        return _print_dry_run(output, dry_run_report(plan))
    _print_artifact(output, calibrated(plan, folder, data, worker_options, output))


def planned(
    method: Method, data: DataOptions, disk: float, model_options: opt.LoadOptions
) -> tuple[CalibrationPlan, Path]:
    """Return the calibration of the loaded model, and the artifact's folder. UsageError for what cannot be
    calibrated."""
    # Waiting threads sleep instead of spinning, which doubles the time on a busy machine. Read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from kvq_cli.data.texts import check_dataset

    method.check_calibrates()
    check_dataset(data.dataset)
    folder = data.folder(artifact_folder(model_options.model, method))
    from kvq_cli.calibration.plan import plan_calibration

    return plan_calibration(model_options.load(), method, data.options(disk, model_options.seed)), folder


def calibrated(
    plan: CalibrationPlan, folder: Path, data: DataOptions, worker_options: opt.WorkerOptions, output: Output
) -> Artifact:
    """Run the calibration and write its artifact. output: for progress and notes."""
    from kvq_cli.calibration import pipeline

    device = plan.loaded.model.device.type
    with worker_options.connected(device) as workers, data.resumable(output) as arguments:
        return pipeline.calibrate(plan, folder, **arguments, workers=workers)


def _print_dry_run(output: Output, found: dict[str, Any]) -> None:
    rows = [[t["name"], "x".join(map(str, t["shape"])), t["dtype"], human_bytes(t["bytes"])] for t in found["tensors"]]
    output.table(["tensor (per layer)", "shape", "dtype", "bytes, all layers"], rows)
    settings, clusters = found["request"]["calibration"], "captured_bytes" in found
    output.text(f"artifact   {human_bytes(found['artifact_bytes'])}")
    if found["disk_bytes"]:
        output.text(f"disk       {human_bytes(found['disk_bytes'])} while calibrating")
    output.text(f"memory     about {human_bytes(found['memory_bytes'])}, model and libraries included")
    if settings and not clusters:
        output.text(f"data       {settings['samples']} samples of {settings['seqlen']} tokens")
    elif settings:
        output.text(
            f"data       {settings['samples']} samples of {settings['seqlen']} tokens, "
            f"{settings['gradients']} of them with gradients; {found['captured_share']:.0%} of the tokens kept"
        )
    else:
        output.text("data       none: the method only factorizes weights")
    if clusters and found["checkpointed_layers"]:
        output.text(f"gradients  {found['checkpointed_layers']} layers run twice, to save memory (checkpointing)")
    output.result(found)


#: Streams with fewer effective tokens are warned of: their transforms are fitted to the gradients of so few.
FEW_TOKENS = 32


def print_effective_tokens(output: Output, layers: Sequence[Mapping[str, Any]]) -> None:
    """Print the effective tokens of each stream that has transforms, and warn where these are few."""
    found = [[layer.get(kind, {}).get("effective_tokens") for kind in "kv"] for layer in layers]
    if not any(tokens is not None for row in found for tokens in row):
        return
    rows = [[index, *("" if each is None else round(each) for each in row)] for index, row in enumerate(found)]
    output.table(["layer", "effective tokens, keys", "values"], rows)
    few = [tokens for row in found for tokens in row if tokens is not None and tokens < FEW_TOKENS]
    if few:
        output.warn(
            f"{len(few)} of {2 * len(layers)} streams have fewer than {FEW_TOKENS} effective tokens (least: "
            f"{min(few):.0f}): these few hold most of the squared gradients, and another text may have other ones; "
            "take more --samples"
        )


def _print_artifact(output: Output, artifact: Artifact) -> None:
    config = artifact.config
    layers = config["errors"]["layers"]
    if "captured" in config:
        mean = {kind: sum(layer[kind]["chosen"]["fisher"] for layer in layers) / len(layers) for kind in ("k", "v")}
        summary = f"error on held-out text, Fisher-weighted: keys {mean['k']:.4f}, values {mean['v']:.4f}"
    else:
        residuals = [one["residual"] for layer in layers for one in layer.values()]
        summary = (
            f"factors of the weights, relative error at most {max(residuals):.1e}"
            if residuals
            else "nothing to calibrate for this model"
        )
    print_effective_tokens(output, layers)
    output.text(f"{artifact.path}: {human_bytes(config['sizes']['total'])}; {summary}")
    output.result({"artifact": str(artifact.path), "digest": artifact.digest, **config})

"""`kvq calibrate`: make the artifact of a method for a model."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.output import Output, human_bytes
from kvq_cli.paths import artifact_folder

_data = partial(typer.Option, rich_help_panel="Calibration")

Out = Annotated[
    Path | None, _data("--out", metavar="DIR", help="Where to write (default: a folder of artifacts/MODEL).")
]
Dataset = Annotated[
    str,
    _data("--dataset", metavar="NAME", help="prose, pydoc, self (all offline), wikitext2, c4, ptb, or a text file."),
]
Samples = Annotated[int | None, _data("--samples", min=2, help="Windows of text (default: 64 x 2048 tokens of them).")]
Seqlen = Annotated[
    int | None, _data("--seqlen", min=1, help="Tokens of each (default: 2048, or the model's own length).")
]
Gradients = Annotated[int | None, _data("--gradients", min=2, help="Samples with gradients (default: all).")]
Points = Annotated[int, _data("--points", min=256, help="Blocks that each codebook is clustered from.")]
Iterations = Annotated[int, _data("--iterations", min=1, help="Iterations of k-means, at most.")]
Kmeans = Annotated[
    Literal["auto", "kvq", "faiss"],
    _data("--kmeans", help="K-means by kvq or faiss; auto: faiss for more than 1,024 entries, where it is installed."),
]
Damping = Annotated[
    float,
    _data(
        "--damping", min=0.0, help="Share of the mean Fisher weight added to every block's; 0: squared gradients alone."
    ),
]
Budget = Annotated[
    float, _data("--budget", metavar="GIB", help="Disk for captured numbers; beyond it, a sample is kept.")
]
Fisher = Annotated[bool, _data("--fisher/--no-fisher", help="Weight k-means by squared gradients.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with an interrupted calibration.")]
Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print tensors, bytes and expected memory, and stop.")]


def calibrate(
    method: opt.MethodName = "temporalkv",
    bits: opt.Bits = None,
    set_: opt.Set = None,
    out: Out = None,
    dataset: Dataset = "prose",
    samples: Samples = None,
    seqlen: Seqlen = None,
    gradients: Gradients = None,
    points: Points = 8192,
    iterations: Iterations = 50,
    kmeans: Kmeans = "auto",
    damping: Damping = 0.1,
    budget: Budget = 4.0,
    fisher: Fisher = True,
    resume: Resume = False,
    force: Force = False,
    dry_run: DryRun = False,
    model: opt.Model = "reference",
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    seed: opt.Seed = 0,
    config: opt.Config = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Capture keys, values and gradients of a model, cluster them, and write a method's artifact.

    Ctrl-C keeps what is done: the same command with --resume goes on from there.
    """
    output = Output(as_json=as_json, quiet=quiet)
    # Threads that wait for each other sleep: where other programs run, too, spinning doubles the time. Read by torch.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from kvq_cli.methods.registry import build

    given = opt.method_options(set_) | ({} if bits is None else {"bits": bits}) | ({} if fisher else {"fisher": False})
    built = build(method or "temporalkv", **given)

    from kvq_cli.calibration import pipeline
    from kvq_cli.calibration.estimate import dry_run_report
    from kvq_cli.calibration.plan import plan_calibration
    from kvq_cli.calibration.settings import CalibrationOptions
    from kvq_cli.models import load_model

    options = CalibrationOptions(dataset, samples, seqlen, gradients, points, iterations, damping, budget, seed, kmeans)
    plan = plan_calibration(load_model(model, device, dtype), built, options)
    if dry_run:
        return _print_dry_run(output, dry_run_report(plan))
    folder = out or artifact_folder(model, built)
    try:
        with output.phases() as progress:
            artifact = pipeline.calibrate(plan, folder, resume=resume, force=force, progress=progress)
    except KeyboardInterrupt:
        output.note("interrupted; the same command with --resume goes on from here")
        raise
    _print_artifact(output, artifact)


def _print_dry_run(output: Output, found: dict) -> None:
    rows = [[t["name"], "x".join(map(str, t["shape"])), t["dtype"], human_bytes(t["bytes"])] for t in found["tensors"]]
    output.table(["tensor (per layer)", "shape", "dtype", "bytes, all layers"], rows)
    settings = found["request"]["calibration"]
    output.text(f"artifact   {human_bytes(found['artifact_bytes'])}")
    if settings:
        output.text(f"disk       {human_bytes(found['captured_bytes'])} while calibrating")
    output.text(f"memory     about {human_bytes(found['memory_bytes'])}, model and libraries included")
    if settings:
        output.text(
            f"data       {settings['samples']} samples of {settings['seqlen']} tokens, "
            f"{settings['gradients']} of them with gradients; {found['captured_share']:.0%} of the tokens kept"
        )
    else:
        output.text("data       none: the method needs factors of the weights only")
    if settings and found["gradient_checkpointing"]:
        output.text("gradients  with checkpointing: layers run twice, to save memory")
    output.result(found)


def _print_artifact(output: Output, artifact) -> None:
    config = artifact.config
    layers = config["errors"]["layers"]
    if config["calibration"]:
        mean = {kind: sum(layer[kind]["chosen"]["fisher"] for layer in layers) / len(layers) for kind in ("k", "v")}
        said = f"error on held-out text, Fisher-weighted: keys {mean['k']:.4f}, values {mean['v']:.4f}"
    else:
        worst = max((one["residual"] for layer in layers for one in layer.values()), default=0.0)
        said = (
            f"factors of the weights, relative error at most {worst:.1e}" if worst else "nothing had to be calibrated"
        )
    output.text(f"{artifact.path}: {human_bytes(config['sizes']['total'])}; {said}")
    output.result({"artifact": str(artifact.path), "digest": artifact.digest, **config})

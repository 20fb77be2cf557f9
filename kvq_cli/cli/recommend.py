"""`kvq recommend`: which method to take for a model, a memory and a length, measured on text."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.command_line import command_line
from kvq_cli.cli.eval import tracker
from kvq_cli.cli.option_groups import grouped
from kvq_cli.cli.output import Output, human_bytes
from kvq_cli.cli.plan import GpuName, Memory, PlannedContext, Reserve, memory_bytes
from kvq_cli.cli.sizes import MAX_COUNT, note_other_layers
from kvq_cli.errors import UsageError
from kvq_cli.paths import artifact_folder, short_name
from kvq_cli.units import parse_bytes

if TYPE_CHECKING:
    from kvq_cli.artifact import Artifact
    from kvq_cli.methods.base import Method
    from kvq_cli.models import LoadedModel
    from kvq_cli.tuning.recommend import Candidate, Measured, Need

#: Windows of text for a calibration of minutes, and their tokens.
SAMPLES, SEQLEN = 16, 512
DEFAULT_CONTEXT = 8192

Users = Annotated[
    int, typer.Option("--users", min=1, max=MAX_COUNT, help="Number of texts that are held at the same time.")
]
Dataset = Annotated[
    str,
    typer.Option(
        "--dataset",
        metavar="NAME",
        help="Text to calibrate and to measure on, each on its own part: prose, pydoc, wikitext2, ... or a file.",
    ),
]
Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate/--no-calibrate",
        help="Calibrate klt on a little text where the model has no artifact of it; else leave it out.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Folder of the calibration and of finished windows (default: results/recommend/MODEL).",
    ),
]


@dataclass(frozen=True)
class NeedOptions:
    """What must fit into which memory."""

    memory: Memory = None
    gpu: GpuName = None
    reserve: Reserve = "2GB"
    context: PlannedContext = None
    users: Users = 1


@grouped
def recommend(
    need_options: NeedOptions,
    dataset: Dataset = "prose",
    calibrate: Calibrate = True,
    out: Out = None,
    *,
    model_options: opt.LoadOptions,
    output_options: opt.OutputOptions,
) -> None:
    """Recommend a method: plan what fits, measure two or three methods on a little text, and say which to take.

    Of klt, innerq and kivi, the most bits that fit are measured beside the uncompressed model: divergence, speed on
    this device. The method of least divergence is recommended, or, of those whose KL is at most 0.01 nats per token or
    within the standard errors of the least, the one that decodes a token fastest. Run again to resume.
    """
    output = output_options.output()
    found = recommended(need_options, dataset, calibrate, out, model_options, output, command_line())
    _print_rows(output, found, f"{model_options.model}, {dataset}")
    output.text("")
    output.prose(found.reason)
    output.text("\n" + found.lines)
    output.result(found.to_dict())


@dataclass(frozen=True)
class Recommendation:
    """fits: what fits, the uncompressed cache included. rows: of these, those that were measured. row, attachable: the
    best one, and what `attach` takes of it."""

    model: str
    need: Need
    fits: list[Candidate]
    rows: list[Measured]
    row: Measured
    attachable: Method | Artifact

    @property
    def plain(self) -> Candidate | None:
        """The uncompressed cache, if it fits."""
        from kvq_cli.tuning.recommend import PLAIN

        return next((one for one in self.fits if one.method.name == PLAIN), None)

    @property
    def reason(self) -> str:
        """One sentence: why this one."""
        from kvq_cli.tuning.recommend import reason

        return reason(self.row, self.rows, self.need, self.plain)

    @property
    def lines(self) -> str:
        """What to paste."""
        return _lines(self.model, self.attachable, self.row.served)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        label = self.row.label
        taken = label if self.plain is None else self.plain.method.name
        document = {"recommended": taken, "compressed": label, "reason": self.reason, "use": self.lines}
        return {**document, "methods": [one.to_dict() for one in self.rows]}


def recommended(
    options: NeedOptions,
    dataset: str,
    calibrate: bool,
    out: Path | None,
    model_options: opt.LoadOptions,
    output: Output,
    command: str,
) -> Recommendation:
    """Measure what fits. command: what started this, for the record of the run. output: for progress and notes."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as for `kvq calibrate`
    from kvq_cli.data.texts import check_dataset
    from kvq_cli.files import check_writable

    check_dataset(dataset)
    room = memory_bytes(options.memory, options.gpu) - parse_bytes(options.reserve, "--reserve")
    folder = out or Path("results/recommend") / short_name(model_options.model)
    check_writable(folder)
    from kvq_cli.tuning.recommend import PLAIN, Need, best, candidates, measured

    size = model_options.size()
    context = min(DEFAULT_CONTEXT, size.context) if options.context is None else options.context
    need = Need(size.shape, size.weights_bytes, size.context, room, context, options.users)
    note_other_layers(size.shape, model_options.model, output)
    fits = candidates(need)
    loaded = model_options.load()
    output.note("fits: " + ", ".join(f"{one.method.name} at {one.method.nominal_bits:g} bits" for one in fits))
    compressed = [one for one in fits if one.method.name != PLAIN]
    seed = model_options.seed
    chosen = [(one, _ready(one.method, loaded, dataset, seed, folder, calibrate, output)) for one in compressed]
    ready = [(one, attachable) for one, attachable in chosen if attachable is not None]
    if not ready:
        raise UsageError("no compressed method is left to measure: of what fits, none is ready for this model")
    with output.progress() as progress:
        track = tracker(progress)
        rows = list(measured(loaded, ready, dataset, folder, seed, command=command, track=track, note=output.note))
    row = best(rows)
    [attachable] = [each for one, each in ready if one.capacity is row.capacity]
    return Recommendation(model_options.model, need, fits, rows, row, attachable)


def _ready(
    method: Method, loaded: LoadedModel, dataset: str, seed: int, folder: Path, calibrate: bool, output: Output
) -> Method | Artifact | None:
    """The method, or the model's artifact of it, else one of a quick calibration; None without `calibrate`."""
    if not method.calibrates:
        return method
    from kvq_cli.artifact import load_artifact
    from kvq_cli.calibration import pipeline
    from kvq_cli.calibration.plan import plan_calibration
    from kvq_cli.calibration.settings import CalibrationOptions

    own = artifact_folder(loaded.name, method)
    if not own.is_dir() and not calibrate:
        output.note(f"left out: {method.name}, of which the model has no artifact (--calibrate makes one)")
        return None
    seqlen = loaded.default_length(SEQLEN)
    options = CalibrationOptions(dataset=dataset, samples=SAMPLES, seqlen=seqlen, seed=seed)
    made = folder / f"{own.name}-{short_name(dataset)}"
    if not own.is_dir() and not made.is_dir():
        output.note(
            f"calibrating {own.name} on {SAMPLES} windows of {seqlen} tokens: `kvq calibrate` takes more, for less loss"
        )
    try:
        if own.is_dir():
            held = load_artifact(own)
            held.check_model(loaded.model, loaded.name)
            return held
        plan = plan_calibration(loaded, method, options)
        with output.phases() as progress:
            return pipeline.calibrate(plan, made, resume=True, progress=progress, note=output.note)
    except UsageError as error:  # the artifact is another model's, or the model or the text lacks something
        output.note(f"left out: {method.name}: {error}")
        return None


def _print_rows(output: Output, found: Recommendation, title: str) -> None:
    rows, context, users = found.rows, found.need.context, found.need.users
    columns = ["method", "KL", "top-1", "perplexity", "ms/token", "of plain", f"cache, {users} x {context:,}"]
    columns += [f"longest context x {users}", f"most users x {context:,}"]
    table = []
    for one in found.fits:
        own = one.capacity
        sizes = [human_bytes(own.cache), f"{own.context:,}", f"{own.batch:,}"]
        row = next((row for row in rows if row.capacity is own), None)
        if row is not None:
            error = "" if row.kl_error is None else f" ±{row.kl_error:.4f}"
            scores = [f"{row.kl:.4f}{error}", f"{row.top1:.1%}", f"{row.perplexity:+.1%}"]
            table.append([row.label, *scores, f"{row.ms:.1f}", f"{row.ms / row.ms_plain:.2f}x", *sizes])
        elif not one.method.calibrates:  # the uncompressed cache; a method left out has no row
            table.append([one.method.name, "0", "100.0%", "+0.0%", f"{rows[0].ms_plain:.1f}", "1.00x", *sizes])
    output.table(columns, table, title=f"{title}; divergence from the uncompressed model, nats per token")


def _lines(model: str, attachable: Method | Artifact, served: bool) -> str:
    """What to paste: Python, and the server's command where it takes the method."""
    from kvq_cli.methods.base import Method

    if isinstance(attachable, Method):
        bits = attachable.nominal_bits
        name, flags = f"{attachable.name}-{bits:g}bit", ["--method", attachable.name, "--bits", f"{bits:g}"]
    else:
        name, flags = str(attachable.path), ["--artifact", str(attachable.path)]
    lines = [
        "from kvq_cli import attach",
        f'with attach(model, "{name}") as kv:',
        "    output = kv.generate(**inputs)",
    ]
    command = shlex.join(["kvq", "serve", "--model", model, *flags])
    return "\n".join(lines + (["", command] if served else []))

"""`kvq reproduce`: the tables and figures of the papers, one by one or all that this machine can do."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.output import Output
from kvq_cli.errors import KvqError, UsageError

if TYPE_CHECKING:
    from kvq_cli.papers.targets import Target

Names = Annotated[
    list[str] | None, typer.Argument(metavar="NAME...", help="Like table-temporalkv-6; none: all listed.")
]
Everything = Annotated[bool, typer.Option("--all", help="All that need no GPU and no other model.")]
Fast = Annotated[bool, typer.Option("--fast", help="With --all: those alone that take little time.")]
Options = Annotated[
    str, typer.Option("--options", metavar="TEXT", help='More options of its command: "--device cuda --limit 50".')
]
Page = Annotated[Path | None, typer.Option("--page", metavar="FILE", help="Write the page of the papers' claims.")]
Root = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where results go, in a folder per model.")]
Store = Annotated[Path, typer.Option("--store", metavar="DIR", help="Finished samples, shared by all targets.")]


def reproduce(
    names: Names = None,
    everything: Everything = False,
    fast: Fast = False,
    options: Options = "",
    page: Page = None,
    model: opt.Model = "reference",
    out: Root = Path("results/reproduction"),
    store: Store = Path("results/samples"),
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Make tables and figures of the papers on the built-in model, or on theirs with --model; goes on where it stopped.

    Without a name: list them all with what each needs and how far it is.
    """
    output = Output(as_json=as_json, quiet=quiet)
    from kvq_cli.papers.targets import target, targets

    if page is not None:
        from kvq_cli.files import write_text
        from kvq_cli.papers.page import page_text

        write_text(page, page_text(model, out), "--page")
        output.note(f"written: {page}")
        return
    if names and everything:
        raise UsageError("NAME with --all: drop one of the two")
    if fast and not everything:
        raise UsageError("--fast goes with --all")
    try:
        shlex.split(options)
    except ValueError as error:
        raise UsageError(f"--options {options}: {error}") from None
    if not names and not everything:
        return _list(output, model, out)
    wanted = [target(name) for name in names or []] or [
        one for one in targets().values() if one.runs and not one.extra and (one.fast or not fast)
    ]
    if options and (fixed := [one.id for one in wanted if one.run and not everything]):
        raise UsageError(f"--options: {', '.join(fixed)} takes none")
    wanted = [replace(one, options=f"{one.options} {options}".strip()) for one in wanted]
    failed = [one.id for one in wanted if not _make(output, one, model, out, store, stop=not everything)]
    if failed:
        raise KvqError(f"not done: {', '.join(failed)}")


def _make(output: Output, one: Target, model: str, root: Path, store: Path, stop: bool) -> bool:
    """Run a target unless it is done; whether it is done then. stop: a failure ends the command."""
    from kvq_cli.papers.run import DONE, run_target, state

    if not one.runs:
        raise UsageError(f"{one.id}: " + (f"{one.drawing}: nothing to run" if one.drawing else "run `make gpu`"))
    if state(one, model, root) == DONE:
        output.note(f"{one.id}: done, {one.result(model, root)}")
        return True
    try:
        seconds = run_target(one, model, _calibrations(one, model), output.note, root, store)
    except KvqError as error:
        if stop:
            raise
        output.warn(f"{one.id}: {error}")
        return False
    output.note(f"{one.id}: {seconds:.0f} s, {one.folder(model, root)}")
    return True


def _calibrations(one: Target, model: str) -> list[list[str]]:
    """The commands for artifacts that the target's methods need and that are not there."""
    from kvq_cli.cli.resolve import calibration, needs_artifact
    from kvq_cli.papers.targets import calibration_options
    from kvq_cli.paths import artifact_folder

    missing = {
        str(artifact_folder(model, method)): [*calibration(model, method), *calibration_options(model), "--resume"]
        for method in one.calibrated(model)
        if not artifact_folder(model, method).is_dir() and needs_artifact(model, method)
    }
    return list(missing.values())


def _list(output: Output, model: str, root: Path) -> None:
    from kvq_cli.papers.run import state
    from kvq_cli.papers.targets import targets

    found = [
        {
            "target": one.id,
            "paper": one.paper,
            "what": one.what,
            "needs": _needs(one),
            "here": f"{one.minutes} min" if one.runs else None,
            "state": state(one, model, root),
        }
        for one in targets().values()
    ]
    output.table(list(found[0]), [list(one.values()) for one in found])
    output.result(found)


def _needs(one: Target) -> str:
    """What the paper's own sizes need; the built-in model stands in for the models here."""
    from kvq_cli.papers.targets import paper_data

    if one.drawing:
        return one.drawing
    model = one.models[0] + (f" and {len(one.models) - 1} more" if len(one.models) > 1 else "") if one.models else ""
    return ", ".join(part for part in (model, paper_data(one), "an NVIDIA GPU" if one.gpu else "") if part) or "nothing"

"""`kvq reproduce`: reproduce tables and figures of the papers, by name or all that need no GPU."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.output import Output
from kvq_cli.cli.rules import unless
from kvq_cli.errors import KvqError, UsageError

if TYPE_CHECKING:
    from kvq_cli.papers.commands import Commands
    from kvq_cli.papers.targets import Target

Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME...", help="Tables or figures, like table-temporalkv-6; without a name, list all."),
]
Everything = Annotated[
    bool,
    typer.Option("--all", help="Reproduce everything that needs no GPU and no other model, after the ones named."),
]
Fast = Annotated[bool, typer.Option("--fast", help="With --all: only the quick ones.")]
Options = Annotated[
    str,
    typer.Option(
        "--options", metavar="TEXT", help='Further options of the underlying command: "--device cuda --samples 50".'
    ),
]
Root = Annotated[Path, typer.Option("--out", metavar="DIR", help="Result folder, with a subfolder per model.")]
Store = Annotated[
    Path, typer.Option("--store", metavar="DIR", help="Folder of finished samples, shared by all tables and figures.")
]

_made = unless(
    lambda values: bool(values["names"] or values["everything"]), "without NAME or --all, targets are listed"
)

#: Folder of the activations that the calibrations of a model share.
CAPTURED = Path("results/captured")
#: File descriptor of the standard error of commands.
STDERR = 2
#: Targets, and calibrations of a target, that run at the same time on workers.
TOGETHER = 2
#: What lines on stderr begin with of the command that evaluates the methods of several targets.
SAMPLES = "shared samples"


def reproduce(
    names: Names = None,
    everything: Everything = False,
    fast: Fast = False,
    options: Annotated[Options, _made] = "",
    model: opt.Model = "reference",
    trust_remote_code: opt.TrustRemoteCode = False,
    accept_license: opt.AcceptLicense = False,
    out: Root = Path("results/reproduction"),
    store: Annotated[Store, _made] = Path("results/samples"),
    workers: Annotated[opt.WorkerCount, _made] = None,
    ray: Annotated[opt.RayAddress, _made] = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Reproduce tables and figures of the papers on the built-in model, or on any other with --model.

    An interrupted run resumes. Without a name: list all tables and figures, their requirements and their state.
    """
    output = Output(as_json=as_json, quiet=quiet)
    from kvq_cli.papers.targets import target, targets

    if fast and not everything:
        raise UsageError("--fast needs --all")
    try:
        shlex.split(options)
    except ValueError as error:
        raise UsageError(f"--options {options}: {error}") from None
    if not names and not everything:
        return _list(output, model, out)
    wanted = [target(name) for name in names or []]
    if everything:
        left = [each for each in targets().values() if each not in wanted]
        wanted += [each for each in left if each.runs and not each.extra and (each.fast or not fast)]
    if idle := [each for each in wanted if not each.runs]:
        reason = f"{idle[0].drawing}: nothing to run" if idle[0].drawing else "run `make gpu`"
        raise UsageError(f"{idle[0].id}: {reason}")
    if options and (fixed := [each.id for each in wanted if each.run and not everything]):
        raise UsageError(f"--options: {', '.join(fixed)} has a fixed command without further options")
    from kvq_cli.evaluation.paired import student_t
    from kvq_cli.models import REFERENCE, configured_shape
    from kvq_cli.papers.commands import Commands
    from kvq_cli.papers.run import DONE

    if any(each.eval or each.config for each in wanted):
        student_t(1)  # without scipy, fails now and not behind hours of evaluation
    if model != REFERENCE and any(not each.run for each in wanted):  # fails here, before any process starts
        configured_shape(model, trust_remote_code=trust_remote_code)
    options += " --trust-remote-code" if trust_remote_code else ""
    wanted = [replace(each, options=f"{each.options} {options}".strip()) for each in wanted]
    with opt.WorkerOptions(workers, ray).address() as address:
        # On workers, one command fills the gaps of another: while it starts, waits for its last samples, or draws.
        together = 1 if address is None else TOGETHER
        # With --json, stdout is for the document alone.
        commands = Commands(output.note, together=together, stdout=STDERR if as_json else None)
        runner = _Runner(output, commands, model, trust_remote_code, out, store, address, stop=not everything)
        made = _make_all(runner, wanted)
    output.result(made)
    if failed := [each["id"] for each in made if each["state"] != DONE]:
        raise KvqError(f"not done: {', '.join(failed)}")


def _make_all(runner: _Runner, wanted: Sequence[Target]) -> list[dict[str, Any]]:
    """Run the targets, `runner.commands.together` of them at a time; returns what `_Runner.make` does of each.

    Targets with the same result folder, like the figures of one study, run one after the other: the first finishes all.
    So do targets on the same samples, after the command that evaluates the methods of all.
    """
    from kvq_cli.papers.shared_samples import samples_of

    groups: dict[Path | tuple[str, ...], list[tuple[int, Target]]] = {}
    for number, each in enumerate(wanted, 1):
        group = samples_of(each, runner.model) or each.folder(runner.model, runner.root)
        groups.setdefault(group, []).append((number, each))
    made: dict[int, dict[str, Any]] = {}

    def make(numbered: Sequence[tuple[int, Target]]) -> None:
        runner.evaluate_together([each for _, each in numbered])
        for number, each in numbered:
            made[number] = runner.make(each, number, len(wanted))

    with ThreadPoolExecutor(runner.commands.together) as pool:
        running = [pool.submit(make, numbered) for numbered in groups.values()]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            runner.commands.stop()
    errors = [error for each in running if not each.cancelled() and (error := each.exception())]
    if errors:  # targets that the failure of another one stopped end with KeyboardInterrupt: raise the failure
        raise min(errors, key=lambda error: isinstance(error, KeyboardInterrupt))
    return [made[number] for number in sorted(made)]


@dataclass(frozen=True)
class _Runner:
    """Runs targets of a model. ray: the cluster's address; stop: raise on failure."""

    output: Output
    commands: Commands
    model: str
    trust_remote_code: bool
    root: Path
    store: Path
    ray: str | None
    stop: bool
    calibrating: threading.Lock = field(default_factory=threading.Lock)

    def make(self, wanted: Target, number: int, count: int) -> dict[str, Any]:
        """Run a target unless it is finished; returns its id, state and folder, and the seconds that it took: None if
        it was finished before or failed. KeyboardInterrupt once the commands are stopped."""
        from kvq_cli.papers.run import DONE, state

        if self.commands.stopped:
            raise KeyboardInterrupt
        if count > 1:
            self.output.note(f"{wanted.id}: {number} of {count}")
        folder, seconds = wanted.folder(self.model, self.root), None
        if state(wanted, self.model, self.root) == DONE:
            result = wanted.result(self.model, self.root)
            self.output.note(f"{wanted.id}: done, {result}")
            if wanted.analyze and not result.with_suffix(".png").exists():
                self.output.note(f"{wanted.id}: its figure is missing: `kvq analyze {wanted.analyze}` draws it")
        else:
            with self._failures(wanted.id):
                seconds = self._run(wanted)
                self.output.note(f"{wanted.id}: {seconds:.0f} s, {folder}")
        took = None if seconds is None else round(seconds, 1)
        state_now = state(wanted, self.model, self.root)
        return {"id": wanted.id, "state": state_now, "seconds": took, "folder": str(folder)}

    def evaluate_together(self, wanted: Sequence[Target]) -> None:
        """Evaluate the methods of several unfinished targets on the same samples by one command, before the targets'
        own commands, which then find the samples in the store. It fails like a target; they compute what it did not."""
        from kvq_cli.papers.run import DONE, state
        from kvq_cli.papers.shared_samples import samples_command, samples_of

        if self.commands.stopped:
            raise KeyboardInterrupt
        shared = [each for each in wanted if samples_of(each, self.model)]
        left = [each for each in shared if state(each, self.model, self.root) != DONE]
        if len(left) < 2:
            return
        with self._failures(SAMPLES):
            with self.calibrating:
                for each in left:
                    self._calibrate(each)
            cluster = [] if self.ray is None else ["--ray", self.ray]
            quiet = ["--quiet"] if self.output.quiet else []
            command = samples_command(left, self.model, self.store)
            self.commands.run([*command, *cluster, *quiet], SAMPLES, into=True)

    @contextmanager
    def _failures(self, what: str) -> Iterator[None]:
        """A KvqError inside the block stops all commands, or is a warning; see `stop`."""
        try:
            yield
        except KvqError as error:
            if self.stop:
                self.commands.stop()
                raise
            self.output.warn(f"{what}: {error}")

    def _run(self, wanted: Target) -> float:
        from kvq_cli.papers.run import run_target

        started = time.monotonic()
        with self.calibrating:  # targets that run together need the same artifacts
            self._calibrate(wanted)
            if self.commands.stopped:  # while it waited: before the record of an older result is replaced
                raise KeyboardInterrupt
        run_target(wanted, self.model, self.commands, self.root, self.store, self.output.quiet, self.ray)
        return time.monotonic() - started

    def _calibrate(self, wanted: Target) -> None:
        """Calibrate the missing artifacts of a target, as many at a time as commands may run. One captures the
        activations, the others wait for it."""
        missing = _calibrations(wanted, self.model, self.trust_remote_code, self.ray)
        quiet = ["--quiet"] if self.output.quiet else []

        def calibrate(name: str) -> None:
            self.commands.run([*missing[name], *quiet], f"{wanted.id}, {name}")

        pool = ThreadPoolExecutor(self.commands.together)
        try:
            for finished in [pool.submit(calibrate, name) for name in missing]:
                finished.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _calibrations(wanted: Target, model: str, trust_remote_code: bool, ray: str | None) -> dict[str, list[str]]:
    """Commands that calibrate the missing artifacts of a target's methods, by the artifact's name."""
    from kvq_cli.papers.inputs import clusters
    from kvq_cli.papers.targets import calibration_options
    from kvq_cli.paths import artifact_folder, short_name
    from kvq_cli.resolve import calibrate_command, needs_artifact

    capturing = ["--captured", str(CAPTURED / short_name(model)), *([] if ray is None else ["--ray", ray])]
    return {
        artifact_folder(model, method).name: [
            *calibrate_command(model, method, trust_remote_code),
            *calibration_options(model),
            "--resume",
            *(capturing if clusters(method) else []),
        ]
        for method in wanted.calibrated(model)
        if not artifact_folder(model, method).is_dir() and needs_artifact(model, method, trust_remote_code)
    }


def _list(output: Output, model: str, root: Path) -> None:
    from kvq_cli.papers.run import state
    from kvq_cli.papers.targets import targets

    listed = [
        {
            "target": each.id,
            "paper": each.paper,
            "what": each.what,
            "needs": _needs(each),
            "here": f"{each.minutes} min" if each.runs else None,
            "state": state(each, model, root),
        }
        for each in targets().values()
    ]
    output.table(list(listed[0]), [list(row.values()) for row in listed])
    output.result(listed)


def _needs(listed: Target) -> str:
    """The models, data and hardware that a target needs at the paper's sizes."""
    from kvq_cli.papers.targets import paper_data

    if listed.drawing:
        return listed.drawing
    models = listed.models[0] if listed.models else ""
    if len(listed.models) > 1:
        models += f" and {len(listed.models) - 1} more"
    parts = (models, paper_data(listed), "an NVIDIA GPU" if listed.gpu else "")
    return ", ".join(part for part in parts if part) or "nothing"

"""Run `kvq tune` in resumable steps, and write the artifact of the best configuration with its card and pictures."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvq_cli.artifact import Artifact, load_artifact, save_artifact
from kvq_cli.artifact.contents import tensor_sizes
from kvq_cli.calibration.captures import capture_all, captured_tokens, captures_folder
from kvq_cli.calibration.card import card
from kvq_cli.calibration.finished import Note, check_unchanged, named_inputs
from kvq_cli.calibration.kinds.base import Progress
from kvq_cli.calibration.kinds.mixed import MixedPlan
from kvq_cli.calibration.parallel import deterministic
from kvq_cli.calibration.pipeline import work_folder
from kvq_cli.calibration.settings import calibrate_command
from kvq_cli.data.texts import file_digest
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.figures import has_matplotlib
from kvq_cli.model_source import library_versions
from kvq_cli.tuning.checks import check_request
from kvq_cli.tuning.measure import Meter, held_out_windows
from kvq_cli.tuning.plot import pictures
from kvq_cli.tuning.search import Search, Tried
from kvq_cli.tuning.settings import TuneOptions, goal, measured_under
from kvq_cli.tuning.steps import Steps


def tune(
    plan: MixedPlan,
    options: TuneOptions,
    out: Path,
    *,
    resume: bool = False,
    force: bool = False,
    captured: Path | None = None,
    progress: Progress = lambda *_: None,
    note: Note = lambda _: None,
) -> Artifact:
    """Search, and write the artifact to `out`. Finished steps are kept in `<out>.work` until the end.

    Any interruption and failure leaves that folder, for `resume`; only a UsageError removes it, unless it was resumed.
    plan: of a `mixed` method with the windows to use; its methods are replaced. resume, force, captured, note: as in
    `calibration.pipeline.calibrate`; an unfinished search may go on with another goal and other candidates. Raises
    UsageError for options that cannot work together, KvqError where the goal of the objective "memory" was not reached.
    """
    check_request(plan, options)
    with work_folder(out, resume=resume, force=force) as work:
        if work is None:
            return _load_finished(out, plan, options, note)
        text = (options.text, options.seqlen, options.windows, plan.settings.seed)
        meter = Meter(plan.loaded, held_out_windows(plan.loaded, *text))
        request = {
            **measured_under(plan.request(), options.to_dict()),
            "tokens of --text": meter.digest,
            **plan.named_inputs,
            **plan.text_tokens,
        }
        work.open(request, resume=resume, disk_bytes=0 if captured else plan.disk_bytes())
        try:
            with deterministic(plan.loaded.model.device), captures_folder(plan, work, captured, note) as captures:
                capture_all(plan, captures, progress, weighted=True)
                search = Search(options, Steps(plan, work, captures, meter, progress), progress)
                best = search.run()
                artifact = _write(search, best, out)
        except UsageError:  # a request that cannot work: nothing to resume
            if not resume:
                work.remove()
            raise
        work.remove()
    return artifact


def _load_finished(out: Path, plan: MixedPlan, options: TuneOptions, note: Note) -> Artifact:
    artifact = load_artifact(out)
    if "tuning" not in artifact.config:
        raise UsageError(f"{out} was not made by kvq tune: choose another --out, or replace it with --force")
    asked, made = (
        measured_under(config, tuning) | goal(tuning)
        for config, tuning in ((plan.request(), options.to_dict()), (artifact.config, artifact.config["tuning"]))
    )
    check_unchanged(artifact, asked, made, named_inputs(_inputs(plan, options), library_versions()), note)
    return artifact


def _inputs(plan: MixedPlan, options: TuneOptions) -> dict[str, Any]:
    """The entry `inputs` of the artifact's config."""
    return {**plan.inputs, "held_out": [file_digest(name) for name in options.text]}


def _write(search: Search, best: Tried, out: Path) -> Artifact:
    options, steps, plan = search.options, search.steps, search.steps.plan
    bits = options.budget if options.objective == "kl" else math.ceil(best.bits * 100) / 100
    if options.kl is not None and options.objective == "memory" and best.kl > options.kl:
        raise KvqError(
            f"--kl {options.kl:g}: not reached, the least that was measured is {best.kl:.4g} at {best.bits:.3f} bits: "
            f"raise --kl or --rounds, and continue with --out {out} --resume"
        )
    method, tensors = steps.method(best.names, bits), steps.tensors(best.names)
    made = replace(plan, method=method, spec=method.calibration(plan.loaded.shape))
    config: dict[str, Any] = {
        **made.request(),
        "inputs": _inputs(plan, options),
        "versions": made.versions(),
        "sizes": tensor_sizes(tensors),
        "captured": captured_tokens(plan),
        "errors": {"measure": plan.measure, "layers": steps.errors(best.names)},
        "tuning": _record(search, best),
    }
    command = calibrate_command(method, plan.loaded, plan.settings_dict())
    drawn = pictures(config) if has_matplotlib() else {}
    return save_artifact(out, config, tensors, card(config, command), overwrite=True, pictures=drawn)


def _record(search: Search, best: Tried) -> dict[str, Any]:
    """The entry `tuning` of the artifact's config; see `artifact.schema.TUNING`."""

    def tried(one: Tried) -> dict[str, Any]:
        method = search.steps.method(one.names)
        return {"step": one.step, "bits": one.bits, "kl": one.kl, "keys": method.keys, "values": method.values}

    return {
        **search.options.to_dict(),
        "chosen": next(index for index, one in enumerate(search.tried) if one is best),
        "tried": [tried(one) for one in search.tried],
        "predicted": [{"bits": bits, "kl": kl} for bits, kl in search.curve()],
        "alone": [
            [{"rate": anchor.rate, "kl": anchor.kl} for anchor in search.alone[stream]] for stream in search.streams
        ],
    }

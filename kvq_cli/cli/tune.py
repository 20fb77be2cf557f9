"""`kvq tune`: choose the method and the bits of each layer's keys and values, and write one mixed artifact."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvq_cli.cli import calibrate as cal
from kvq_cli.cli import options as opt
from kvq_cli.cli.option_groups import grouped
from kvq_cli.cli.output import Output, human_bytes
from kvq_cli.cli.rules import read, unless
from kvq_cli.paths import model_artifacts

if TYPE_CHECKING:
    from kvq_cli.artifact import Artifact

_search = partial(typer.Option, rich_help_panel="Search")

Budget = Annotated[
    float,
    _search(
        "--budget",
        metavar="BITS",
        help="Bits per number: codes, scales and outliers of packed tokens, as `kvq bits` counts them (`packed`). With "
        "--objective memory: the bits to begin with.",
    ),
]
Objective = Annotated[
    Literal["kl", "memory"],
    _search(
        "--objective", help="kl: least KL divergence within --budget; memory: fewest bits whose KL is within --kl."
    ),
]
Kl = Annotated[
    float | None,
    _search(
        "--kl",
        metavar="NATS",
        help="Required with --objective memory: maximum KL divergence to the uncompressed model, in nats per token.",
    ),
]
Candidates = Annotated[
    str | None,
    _search(
        "--candidates",
        metavar="NAMES",
        help="Methods of single streams, separated by commas, named as for --compare; klt first, which takes any "
        "number of bits (default: klt, temporalkv, kvquant and kivi at several bits, fp16).",
    ),
]
Text = Annotated[
    str,
    _search(
        "--text",
        metavar="NAMES",
        help="Texts on whose evaluation split KL is measured, separated by commas: names or files as for --dataset.",
    ),
]
TextSamples = Annotated[int, _search("--text-samples", min=1, help="Number of windows of each text.")]
TextSeqlen = Annotated[
    int, _search("--text-seqlen", min=2, help="Tokens per window; the second half of a window is scored.")
]
Rounds = Annotated[
    int,
    _search("--rounds", min=0, help="Maximum number of rounds; each measures sensitivities and chooses again."),
]
Swaps = Annotated[
    int,
    _search("--swaps", min=0, help="Maximum number of swaps to try; each moves bits from one stream to another."),
]
Minutes = Annotated[
    float | None,
    _search("--minutes", min=0.0, help="Time limit of the search in minutes: no new step starts after it."),
]
Out = Annotated[
    Path | None,
    cal.data_option(
        "--out",
        metavar="DIR",
        help="Output folder (default: artifacts/MODEL/mixed-BITSbit; with --objective memory: "
        "artifacts/MODEL/mixed-kl-NATS).",
    ),
]
_only_memory = unless(lambda values: values["objective"] == "memory", "only --objective memory has a goal for KL")


@dataclass(frozen=True)
class TunedDataOptions(cal.DataOptions):
    """Those of `kvq calibrate`, with another default folder."""

    out: Out = None


@grouped
def tune(
    *,
    budget: Budget = 2.0,
    objective: Objective = "kl",
    kl: Annotated[Kl, _only_memory] = None,
    candidates: Candidates = None,
    text: Text = "prose,pydoc",
    text_samples: TextSamples = 2,
    text_seqlen: TextSeqlen = 1024,
    rounds: Rounds = 3,
    swaps: Swaps = 8,
    minutes: Minutes = None,
    set_: opt.Set = None,
    data: Annotated[TunedDataOptions, read],
    disk: cal.Disk = 4.0,
    model_options: opt.LoadOptions,
    output_options: opt.OutputOptions,
) -> None:
    """Choose the method and the bits of each layer's keys and values, and write one mixed artifact.

    Calibrates candidates, measures how much KL divergence each stream costs, finds the choice of least KL within the
    budget, checks it on held-out text, and improves it by exchanging bits. The artifact's card lists what was tried.
    --set sets the windows (sinks, recent, buffer) that the artifact is tuned for. After Ctrl-C, the same command with
    --resume continues.
    """
    output = output_options.output()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as for `kvq calibrate`
    from kvq_cli.tuning.settings import CANDIDATES, TuneOptions, windows_options

    named = CANDIDATES if candidates is None else tuple(opt.names(candidates, "--candidates"))
    texts = tuple(opt.names(text, "--text"))
    options = TuneOptions(objective, budget, kl, named, texts, text_samples, text_seqlen, rounds, swaps, minutes)
    chosen_windows = windows_options(opt.method_options(set_))
    goal = f"{budget:g}bit" if objective == "kl" else f"kl-{kl:g}"
    folder = data.folder(model_artifacts(model_options.model) / f"mixed-{goal}")

    from kvq_cli.calibration.kinds.mixed import MixedPlan
    from kvq_cli.data.texts import file_digest
    from kvq_cli.methods.registry import build
    from kvq_cli.tuning.run import tune as run_search

    calibrated_on = file_digest(data.dataset)
    for name in texts:
        if calibrated_on is not None and file_digest(name) == calibrated_on:
            output.warn(f"--text {name} is the text of --dataset: KL is measured on text that calibration reads")
    first = build("mixed", bits=16, keys="klt-1bit", values="klt-1bit", **chosen_windows)
    plan = MixedPlan.make(model_options.load(), first, data.options(disk, model_options.seed))
    with data.resumable(output) as arguments:
        artifact = run_search(plan, options, folder, **arguments)
    _print_artifact(output, artifact)


def _print_artifact(output: Output, artifact: Artifact) -> None:
    from kvq_cli.artifact.errors import cached_layers, method_of

    config = artifact.config
    tuning, layers = config["tuning"], enumerate(cached_layers(config))
    rows = [[layer, *(method_of(config, place, kind) for kind in "kv")] for place, layer in layers]
    output.table(["layer", "keys", "values"], rows)
    chosen = tuning["chosen"]
    rows = [
        [one["step"] + (" (chosen)" if index == chosen else ""), round(one["bits"], 3), one["kl"]]
        for index, one in enumerate(tuning["tried"])
    ]
    output.table(["tried", "packed bits", "KL"], rows, title=f"KL in nats per token on {', '.join(tuning['text'])}")
    output.text(f"{artifact.path}: {human_bytes(config['sizes']['total'])}")
    output.result({"artifact": str(artifact.path), "digest": artifact.digest, **config})

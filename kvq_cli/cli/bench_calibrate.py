"""`kvq bench calibrate`: time of each phase of a calibration, and its peak memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from kvq_cli.cli import options as opt
from kvq_cli.cli.bench_shared import (
    OutDir,
    RandomShape,
    bench_option,
    load_or_randomize,
    not_random,
    only_random,
    result_header,
    write_result,
)
from kvq_cli.cli.calibrate import build_method, only_text
from kvq_cli.cli.option_groups import grouped
from kvq_cli.cli.output import human_bytes
from kvq_cli.files import check_writable

Dataset = Annotated[
    str,
    bench_option(
        "--dataset",
        metavar="NAME",
        help="Calibration text: prose, pydoc, self, wikitext2, c4, ptb or a file (.txt, .jsonl[:FIELD]).",
    ),
]
Samples = Annotated[int, bench_option("--samples", min=2, help="Number of text windows.")]
Seqlen = Annotated[
    int | None,
    bench_option("--seqlen", min=1, help="Tokens per window (default: 2048, at most the model's context length)."),
]

Layers = Annotated[
    int | None,
    bench_option("--layers", min=1, help="With --random: number of layers; the time grows linearly with it."),
]


@dataclass(frozen=True)
class _ModelOptions(opt.LoadOptions):
    """The model, unless --random replaces it."""

    model: Annotated[opt.Model, not_random] = "reference"
    trust_remote_code: Annotated[opt.TrustRemoteCode, not_random] = False
    accept_license: Annotated[opt.AcceptLicense, not_random] = False


@grouped
def calibrate(
    model_options: _ModelOptions,
    output: opt.OutputOptions,
    method: opt.MethodName = "temporalkv",
    bits: opt.BitsWithDefault = 2,
    set_: opt.Set = None,
    dataset: Annotated[Dataset, only_text] = "prose",
    samples: Annotated[Samples, only_text] = 64,
    seqlen: Annotated[Seqlen, only_text] = None,
    random: RandomShape = None,
    layers: Annotated[Layers, only_random] = None,
    out_dir: OutDir = Path("results/bench"),
) -> None:
    """Measure the time of each phase of a calibration and its peak memory; the artifact is discarded."""
    out = output.output()
    from kvq_cli.benchmarking.shapes import SHAPES, known_shape
    from kvq_cli.data.texts import check_dataset
    from kvq_cli.methods.registry import to_config

    built = build_method(method, bits, set_)
    built.check_calibrates()
    check_dataset(dataset)
    if random is not None:
        known_shape(random, "--random")
    # Wrong options are reported before PyTorch is imported.
    from kvq_cli.benchmarking.calibrate import measure
    from kvq_cli.benchmarking.synthetic import as_loaded_model
    from kvq_cli.calibration.plan import plan_calibration
    from kvq_cli.calibration.settings import CalibrationOptions

    if random is None:
        loaded = model_options.load()
    else:
        made, name = load_or_randomize(
            model_options.model, random, model_options.device, model_options.dtype, model_options.seed, layers=layers
        )
        loaded = as_loaded_model(made, name, model_options.seed)
    plan = plan_calibration(loaded, built, CalibrationOptions(dataset, samples, seqlen, seed=model_options.seed))
    check_writable(out_dir)
    with out.phases() as show:
        found = measure(plan, show)
    document = {
        **result_header("calibrate", loaded.model, loaded.label),
        "method": to_config(built),
        "calibration": plan.settings_dict(),
        "layers": loaded.shape.layers,
        "layers_of_shape": loaded.shape.layers if random is None else SHAPES[random].layers,
        **found,
    }
    written = write_result(out_dir, "calibrate", document)
    rows = [[phase, round(seconds, 2)] for phase, seconds in found["phases_s"].items()]
    out.table(["phase", "seconds"], [*rows, ["all", round(found["total_s"], 2)]])
    if found["peak_bytes"] is not None:
        out.text(f"peak memory {human_bytes(found['peak_bytes'])}, artifact {human_bytes(found['artifact_bytes'])}")
    out.note(f"written: {written}")
    out.result(document)

"""`kvq bench generate`: time and memory of generation with compressed caches and with transformers' own caches."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvq_cli.cli import options as opt
from kvq_cli.cli.bench_shared import (
    OutDir,
    bench_option,
    load_or_randomize,
    not_random,
    only_random,
    result_header,
    resumable_result,
    write_result,
)
from kvq_cli.cli.output import Output, human_bytes
from kvq_cli.cli.rules import Rule, unless
from kvq_cli.errors import UsageError
from kvq_cli.files import check_writable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvq_cli.benchmarking.baselines import BenchmarkedCache
    from kvq_cli.evaluation.base import ComparedMethod

Compare = Annotated[str, bench_option("--compare", metavar="NAMES", help="Methods to measure, joined by commas.")]
Contexts = Annotated[
    str, bench_option("--context", metavar="LENGTHS", help="Prompt lengths in tokens, joined by commas.")
]
Batches = Annotated[str, bench_option("--batch", metavar="SIZES", help="Batch sizes, joined by commas.")]
Tokens = Annotated[int, bench_option("--tokens", min=1, help="Tokens to decode per round.")]
Rounds = Annotated[int, bench_option("--rounds", min=1, help="Timed rounds, after one warm-up round.")]
Grow = Annotated[
    bool,
    bench_option(
        "--grow", help="Measure throughput and memory at batch sizes 1, 4, 16, ... up to --batch or out of memory."
    ),
]
Seconds = Annotated[
    int | None,
    bench_option(
        "--seconds", min=1, help="With --grow: time limit per model; batch sizes not started by then are left out."
    ),
]
Resume = Annotated[
    bool, bench_option("--resume", help="With --grow: keep the results in --out and measure the remaining caches.")
]
Layers = Annotated[int | None, bench_option("--layers", min=1, help="With --random: number of layers.")]
Shapes = Annotated[
    str | None,
    bench_option(
        "--random",
        metavar="SHAPES",
        help="Random weights in the shapes of known models, joined by commas; instead of --model.",
    ),
]
_only_grow = unless(lambda values: values["grow"], "it needs --grow", refuse=True)
_not_grow = unless(lambda values: not values["grow"], "--grow times one round")
#: Without --grow, transformers' quantized cache has --bits, too.
_bits = Rule(lambda values, flag: opt.of_compared.notes(values, flag) if values["grow"] else [])


def generate(
    compare: Compare = "kivi",
    bits: Annotated[opt.BitsWithDefault, _bits] = 2,
    set_: opt.Set = None,
    context: Contexts = "512,2048",
    batch: Batches = "1,4",
    tokens: Tokens = 32,
    rounds: Annotated[Rounds, _not_grow] = 4,
    grow: Grow = False,
    seconds: Annotated[Seconds, _only_grow] = None,
    resume: Annotated[Resume, _only_grow] = False,
    prefill: opt.Prefill = "exact",
    random: Shapes = None,
    layers: Annotated[Layers, only_random] = None,
    out_dir: OutDir = Path("results/bench"),
    model: Annotated[opt.Model, not_random] = "reference",
    trust_remote_code: Annotated[opt.TrustRemoteCode, not_random] = False,
    accept_license: Annotated[opt.AcceptLicense, not_random] = False,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    backend: opt.Backend = "auto",
    seed: opt.Seed = 0,
    config: opt.Config = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Measure prefill, decoding and memory of kvq's methods and of transformers' plain and quantized (quanto) caches.

    With --random, methods that need calibration use random codebooks; time and memory are the same as with real ones.
    """
    # Read when torch is imported: its profiler warns about memory that was allocated before it started.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    out = Output(as_json=as_json, quiet=quiet)
    names, contexts = opt.names(compare, "--compare"), opt.numbers(context, "--context")
    batches = opt.numbers(batch, "--batch")
    shapes: list[str | None] = [None] if random is None else list(opt.names(random, "--random"))
    if grow and len(contexts) > 1:
        raise UsageError(f"--grow measures one prompt length: give --context one number, not {context}")
    _check_names(names, shapes)
    # Wrong options are reported before PyTorch is imported.
    from kvq_cli.benchmarking.batch_sweep import WARM_UP
    from kvq_cli.benchmarking.generate import BenchmarkGrid
    from kvq_cli.models import model_context

    settings = BenchmarkGrid(tuple(contexts), tuple(batches), tokens, rounds, seed)
    options = opt.method_options(set_)
    compared = [] if random else _compared(model, names, bits, options, trust_remote_code)
    check_writable(out_dir)
    documents = []
    for shape in shapes:
        loaded, name = load_or_randomize(
            model, shape, device, dtype, seed, layers=layers, trust_remote_code=trust_remote_code
        )
        settings.check(model_context(loaded.config), WARM_UP if grow else 0)
        chosen = compared if shape is None else _random_compared(loaded, name, names, seed, bits, options)
        peers, skipped = _peers(out, chosen, bits, prefill, backend, quanto_too=not grow)
        document = {
            **result_header("generate", loaded, name),
            "weights_bytes": sum(p.numel() * p.element_size() for p in loaded.parameters()),
            "layers": loaded.config.get_text_config().num_hidden_layers,
            "prefill": prefill,
            "backend": backend,
            "tokens": tokens,
            "rounds": 1 if grow else rounds,
            "seed": seed,
            "skipped": skipped,
        }
        stem = ("growth" if grow else "generate") if len(shapes) == 1 else f"{'growth' if grow else 'generate'}-{shape}"
        if grow:
            document |= {"context": contexts[0], "batch": max(batches), "methods": _identities(chosen)}
            _grown(out, loaded, peers, settings, seconds, document, out_dir, stem, resume)
        else:
            _measured(out, loaded, peers, settings, document, out_dir, stem)
        for peer in peers:
            if peer.backend is not None:
                out.note(f"{peer.name}: decode attention: {peer.backend}")
        documents.append(document)
        drawn = _draw(document, out_dir / f"{stem}.png", grow, out)
        out.note(f"written: {out_dir / stem}.json" + (f" and {out_dir / stem}.png" if drawn else ""))
        del loaded, peers, chosen  # free memory for the next model
    out.result(documents[0] if len(documents) == 1 else {"bench": "generate", "models": documents})


def _check_names(methods: list[str], shapes: list[str | None]) -> None:
    """Raise UsageError for unknown methods, but for folders of artifacts, and unknown shapes."""
    from kvq_cli.benchmarking.shapes import known_shape
    from kvq_cli.methods.registry import method_class, parse

    for text in methods:
        if not Path(text).is_dir():
            method_class(parse(text)[0])
    for shape in shapes:
        if shape is not None:
            known_shape(shape, "--random")


def _compared(
    model: str, names: list[str], bits: float | None, options: dict[str, str], trust_remote_code: bool
) -> list[ComparedMethod]:
    from kvq_cli.evaluation.compared_methods import compared_methods
    from kvq_cli.resolve import resolve_compared

    resolved = resolve_compared(model, names, bits, options=options, trust_remote_code=trust_remote_code)
    return compared_methods(resolved)


def _random_compared(
    model: PreTrainedModel, name: str, names: list[str], seed: int, bits: float | None, options: dict[str, str]
) -> list[ComparedMethod]:
    """Methods of a model with random weights, with random artifacts."""
    from kvq_cli.benchmarking.synthetic import random_artifact
    from kvq_cli.evaluation.compared_methods import compared_methods
    from kvq_cli.methods.registry import build, check_shared, has_option, parse
    from kvq_cli.models import model_shape

    shared = options | ({} if bits is None else {"bits": bits})
    chosen, methods = [], []
    for text in names:
        method, own = parse(text)
        methods.append(method)
        built = build(method, **{key: value for key, value in shared.items() if has_option(method, key)} | own)
        wanted = built.needs_artifact(model_shape(model))
        chosen.append(random_artifact(built, model, name, seed) if wanted else built)
    check_shared(methods, shared)
    return compared_methods(chosen)


def _peers(
    out: Output, chosen: list[ComparedMethod], bits: float | None, prefill: str, backend: str, quanto_too: bool
) -> tuple[list[BenchmarkedCache], list[str]]:
    """The caches to measure, and why some are skipped."""
    from kvq_cli.benchmarking.baselines import DynamicCacheBaseline, KvqCache, quanto_baseline

    methods = [KvqCache(one.attachable, one.label, one.method.nominal_bits, prefill, backend) for one in chosen]
    if not quanto_too:
        return [DynamicCacheBaseline(), *methods], []
    baseline = quanto_baseline(bits)
    if isinstance(baseline, str):  # the reason why there is none
        out.warn(baseline)
        return [DynamicCacheBaseline(), *methods], [baseline]
    return [DynamicCacheBaseline(), baseline, *methods], []


def _identities(chosen: list[ComparedMethod]) -> dict[str, Any]:
    """Options and artifact of each cache, by its name, which does not tell all of them."""
    return {f"kvq {one.label}": one.identity for one in chosen}


def _measured(
    out: Output,
    model: PreTrainedModel,
    peers: list[BenchmarkedCache],
    settings: Any,
    document: dict[str, Any],
    folder: Path,
    stem: str,
) -> None:
    """Measure all cases; the document is written after each row, so that a failure keeps the finished ones."""
    from kvq_cli.benchmarking.generate import measure

    document["rows"] = []
    runs: list[str] = []
    try:
        with out.progress() as progress:
            task = progress.add_task("measuring", total=settings.runs * len(peers))
            for row in measure(model, peers, settings, lambda: progress.advance(task), runs.append):
                document["rows"].append(row)
                write_result(folder, stem, document)
    except BaseException as error:
        if runs:
            what = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            kept = f"; {len(document['rows'])} finished rows are kept in {folder / stem}.json"
            out.warn(f"{what}: {runs[-1]}{kept if document['rows'] else ''}")
        raise
    _print(out, document["rows"])


def _grown(
    out: Output,
    model: PreTrainedModel,
    peers: list[BenchmarkedCache],
    settings: Any,
    seconds: int | None,
    document: dict[str, Any],
    folder: Path,
    stem: str,
    resume: bool,
) -> None:
    """Measure growing batches; the document is written after each cache, so that an interrupted run can resume."""
    from kvq_cli.benchmarking.batch_sweep import BatchSweep, sweep_batches

    kept = resumable_result(out, folder / f"{stem}.json", document) if resume else None
    kept = kept or {"rows": [], "measured": [], "methods": {}}
    document |= {key: kept[key] for key in ("rows", "measured")}
    document["methods"] = kept["methods"] | document["methods"]
    growth = BatchSweep(
        settings.contexts[0], settings.tokens, max(settings.batches), settings.seed, seconds or float("inf")
    )
    left = [peer for peer in peers if peer.name not in document["measured"]]
    with out.progress() as progress:
        task = progress.add_task("measuring", total=None)
        for peer, rows in sweep_batches(model, left, growth, lambda: progress.advance(task)):
            document["rows"] += rows
            document["measured"].append(peer.name)
            write_result(folder, stem, document)
    rows = document["rows"]
    columns = ["cache", "batch", "ms/token", "tokens/s", "cache bytes", "peak memory"]
    table = []
    for row in rows:
        if "failed" in row:
            table.append([row["peer"], row["batch"], row["failed"], None, None, None])
            continue
        sizes = [None if row[key] is None else human_bytes(row[key]) for key in ("cache_bytes", "peak_bytes")]
        table.append([row["peer"], row["batch"], f"{row['token_ms']:.2f}", f"{row['tokens_s']:.1f}", *sizes])
    out.table(columns, table)


def _draw(document: dict[str, Any], path: Path, grow: bool, out: Output) -> bool:
    """Plot the results if matplotlib is installed; returns whether it is."""
    from kvq_cli.benchmarking.plot import plot, plot_batch_sweep
    from kvq_cli.figures import has_matplotlib

    if not has_matplotlib():
        out.note("no plot: matplotlib is not installed")
        return False
    title = f"{document['model']}, {document['dtype']}, {document['machine']['device']}"
    (plot_batch_sweep if grow else plot)(document["rows"], title, path)
    return True


def _print(out: Output, rows: list[dict[str, Any]]) -> None:
    base = {(r["context"], r["batch"]): r for r in rows if r["bits"] is None}
    table = []
    for row in rows:
        plain = base[row["context"], row["batch"]]
        spread, prefill = row["token_ms"], row["prefill_ms"]["p50"]
        table.append(
            [
                row["context"],
                row["batch"],
                row["peer"],
                f"{prefill:.0f}",
                f"{prefill / plain['prefill_ms']['p50']:.2f}x",
                f"{spread['p50']:.2f}",
                f"{spread['p50'] / plain['token_ms']['p50']:.2f}x",
                f"{spread['p20']:.2f}-{spread['p80']:.2f}",
                human_bytes(row["cache_bytes"]),
                f"{plain['cache_bytes'] / row['cache_bytes']:.1f}x",
                "-" if row["peak_bytes"] is None else human_bytes(row["peak_bytes"]),
            ]
        )
    times = ["prefill ms", "of plain", "ms/token p50", "of plain", "p20-p80"]
    out.table(["context", "batch", "cache", *times, "bytes", "smaller", "peak memory"], table)

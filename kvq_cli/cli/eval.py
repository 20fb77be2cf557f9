"""`kvq eval` (also `kvq evaluate`): scores, perplexity and divergence of compressed caches, side by side."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.output import Output
from kvq_cli.errors import UsageError
from kvq_cli.evaluation.lm_eval.names import GROUPS

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvq_cli.artifact import Artifact
    from kvq_cli.methods.base import Method

MOST_COLUMNS = 10
"""A table with more of them is printed with one column per method."""

_what = partial(typer.Option, rich_help_panel="What to evaluate")
_samples = partial(typer.Option, rich_help_panel="Samples")

Tasks = Annotated[
    str,
    _what(
        "--task",
        "--tasks",
        metavar="NAME,...",
        help="perplexity, ruler, any of RULER's 13 tasks, or lm_eval:NAME with a task of lm-eval; of the papers: "
        + ", ".join(group.name for group in GROUPS)
        + ".",
    ),
]
Compare = Annotated[
    str | None,
    _what(
        "--compare",
        metavar="NAME,...",
        help="Several methods on the same samples: fp16,kivi,kivi-4bit:residual=32 or artifact folders; "
        "--bits and --set go to all that take them.",
    ),
]
Artifacts = Annotated[
    list[Path] | None,
    typer.Option(
        "--artifact",
        metavar="DIR",
        help="A calibrated artifact; may be repeated (default: ./artifacts/MODEL/METHOD-BITSbit).",
        rich_help_panel=opt.METHOD,
    ),
]
Contexts = Annotated[
    str | None,
    _samples(
        "--context",
        metavar="N,...",
        help="RULER: tokens of prompt and answer (default 4096; the built-in model: 1024).",
    ),
]
Limit = Annotated[int | None, _samples("--limit", min=1, help="Samples of each task (default: RULER 500, others all).")]
Dataset = Annotated[
    str, _samples("--dataset", metavar="NAME", help="Perplexity: prose, pydoc, self, wikitext2, c4, ptb or a file.")
]
Seqlen = Annotated[
    int | None,
    _samples("--seqlen", min=2, help="Perplexity: tokens of a window (default 2048; the built-in model: 1024)."),
]
Windows = Annotated[
    int | None, _samples("--windows", min=1, help="Perplexity: windows of text (default: as many as --limit says).")
]
HaystackFile = Annotated[str, _samples("--haystack", metavar="FILE", help="RULER: running text to hide needles in.")]
QaFile = Annotated[
    list[Path] | None,
    _samples(
        "--qa-file",
        metavar="FILE",
        help="RULER: questions in SQuAD's (qa_1) or HotpotQA's (qa_2) format; may be repeated.",
    ),
]
Templates = Annotated[
    Literal["auto", "standard", "reference"],
    _samples("--templates", help="RULER: its own prompts, or the built-in model's; auto goes by the model."),
]
ChatTemplate = Annotated[
    bool, _samples("--chat-template", help="RULER, lm_eval: put prompts into the tokenizer's chat template.")
]
SavePrompts = Annotated[
    bool, _samples("--save-prompts", help="RULER: keep whole prompts in the sample files, not only hashes.")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where results go (default: results/MODEL).")]
Store = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="Finished samples, shared by runs with this folder (default: --out)."),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw scores over measured bits: .png, .pdf or .svg."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Evaluate again what the folder already holds.")]
DataDir = Annotated[
    Path | None,
    _samples(
        "--data-dir",
        metavar="DIR",
        help="Local copies of data sets, in the place of the Hub: DIR/gsm8k/test.jsonl, DIR/wikitext2/test.txt, ...",
    ),
]
Fewshot = Annotated[
    int | None,
    _samples("--num-fewshot", min=0, help="lm_eval: examples in front of each question (default: the task's)."),
]
MaxLength = Annotated[
    int | None,
    _samples("--max-length", min=2, help="lm_eval: tokens of prompt and answer (default: the model's length)."),
]
MaxNewTokens = Annotated[
    int | None, _samples("--max-new-tokens", min=1, help="lm_eval: tokens of an answer (default: the task's).")
]
Truncation = Annotated[
    Literal["left", "middle"],
    _samples("--truncation", help="lm_eval: where prompts that are too long lose tokens; LongBench: middle."),
]
Batch = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Prompts answered at once (default: 8192 tokens' worth).")
]


def evaluate(
    task: Tasks = "perplexity",
    compare: Compare = None,
    method: opt.MethodName = None,
    bits: opt.Bits = None,
    artifact: Artifacts = None,
    set_: opt.Set = None,
    prefill: opt.Prefill = "compressed",
    context: Contexts = None,
    limit: Limit = None,
    dataset: Dataset = "prose",
    seqlen: Seqlen = None,
    windows: Windows = None,
    haystack: HaystackFile = "prose",
    qa_file: QaFile = None,
    templates: Templates = "auto",
    chat_template: ChatTemplate = False,
    data_dir: DataDir = None,
    num_fewshot: Fewshot = None,
    max_length: MaxLength = None,
    max_new_tokens: MaxNewTokens = None,
    truncation: Truncation = "left",
    save_prompts: SavePrompts = False,
    out: Out = None,
    store: Store = None,
    plot: Plot = None,
    fresh: Fresh = False,
    batch_size: Batch = None,
    model: opt.Model = "reference",
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    backend: opt.Backend = "auto",
    seed: opt.Seed = 0,
    config: opt.Config = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Score methods with a compressed cache: RULER, perplexity, tasks of lm-eval; run again to go on where it stopped.

    With --json: lm-eval's result document; of several methods, one for each under `methods`.
    """
    output = Output(as_json=as_json, quiet=quiet)
    from kvq_cli.evaluation.compare import subjects
    from kvq_cli.evaluation.runner import evaluate as run
    from kvq_cli.evaluation.settings import Settings
    from kvq_cli.files import check_writable
    from kvq_cli.models import load_model
    from kvq_cli.paths import short_name

    settings = Settings(
        tasks=opt.names(task, "--task"),
        contexts=None if context is None else opt.numbers(context, "--context"),
        limit=limit,
        seed=seed,
        prefill=prefill,
        backend=backend,
        dataset=dataset,
        seqlen=seqlen,
        windows=windows,
        templates=templates,
        chat_template=chat_template,
        haystack=haystack,
        qa_files=tuple(qa_file or ()),
        batch_size=batch_size,
        save_prompts=save_prompts,
        data_dir=None if data_dir is None else str(data_dir),
        num_fewshot=num_fewshot,
        max_length=max_length,
        max_new_tokens=max_new_tokens,
        truncation=truncation,
    )
    compared = subjects(_chosen(model, compare, method, bits, artifact or [], set_))
    folder = out or Path("results") / short_name(model)
    check_writable(folder)
    if store is not None:
        check_writable(store, "--store")
    if plot is not None:
        from kvq_cli.pictures import check_ending

        check_ending(plot)
        check_writable(plot.parent, "--plot")
    loaded = load_model(model, device, dtype)
    try:
        with output.progress() as progress:
            document = run(loaded, compared, settings, folder, store=store, fresh=fresh, track=_tracker(progress))
    except KeyboardInterrupt:
        output.note(f"finished samples are kept in {store or folder}: the same command goes on from there")
        raise
    _print_table(output, **document["table"])
    if plot is not None:
        from kvq_cli.evaluation.plot import plot_comparison

        plot_comparison(document, plot)
        output.note(f"wrote {plot}")
    used: dict[str, list[str]] = {}
    for label, found in document["methods"].items():
        used.setdefault(found["config"]["backend"], []).append(label)
    for backend, labels in used.items():
        output.note(f"attention while decoding by {backend}" + (f": {', '.join(labels)}" if len(used) > 1 else ""))
    output.note(f"results of this run: {folder / 'comparison.json'}; of each method: its folder beside it")
    single = next(iter(document["methods"].values()))
    for note in (one["note"] for one in single["configs"].values() if "note" in one):
        output.note(note)
    output.result(single if len(compared) == 1 else document)


def _chosen(
    model: str, compare: str | None, method: str | None, bits: int | None, artifacts: list[Path], set_: list[str] | None
) -> list[Method | Artifact]:
    from kvq_cli.cli.resolve import resolve, resolve_compared

    options = opt.method_options(set_)
    if compare is None and len(artifacts) < 2:
        return [resolve(model, method, bits, artifacts[0] if artifacts else None, options)]
    flag = "--compare" if compare is not None else "several --artifact"
    if method:
        raise UsageError(f"{flag} with --method: --method is for a single method; drop one of the two")
    return resolve_compared(model, opt.names(compare, "--compare") if compare else [], bits, artifacts, options)


def _tracker(progress: Progress) -> Callable[[str, int, int], Callable[[int], None]]:
    def track(what: str, total: int, done: int) -> Callable[[int], None]:
        bar = progress.add_task(what, total=total, completed=done)
        return lambda count: progress.advance(bar, count)

    return track


def _print_table(output: Output, columns: list[str], rows: list[list]) -> None:
    if len(columns) > MOST_COLUMNS:
        columns, *rows = [list(line) for line in zip(columns, *rows, strict=True)]
    output.table(columns, rows)

"""`kvq eval` (also `kvq evaluate`): scores, perplexity and divergence of compressed caches, side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.option_groups import grouped
from kvq_cli.cli.output import Output
from kvq_cli.errors import UsageError
from kvq_cli.evaluation.lm_eval.task_groups import GROUPS

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvq_cli.artifact import Artifact
    from kvq_cli.evaluation.settings import EvaluationSettings
    from kvq_cli.methods.base import Method

MAX_COLUMNS = 10
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
PromptTokens = Annotated[
    int | None,
    _samples(
        "--prompt-tokens",
        min=1,
        help="Perplexity: first tokens of a window, from which methods take their state; those behind are scored "
        "(default: half of the window).",
    ),
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


@dataclass(frozen=True)
class Subjects:
    """The methods to evaluate."""

    compare: Compare = None
    method: opt.MethodName = None
    bits: opt.Bits = None
    artifact: Artifacts = None
    set_: opt.Set = None
    prefill: opt.Prefill = "compressed"


@dataclass(frozen=True)
class Samples:
    """The tasks, and the samples of each."""

    task: Tasks = "perplexity"
    context: Contexts = None
    limit: Limit = None
    dataset: Dataset = "prose"
    seqlen: Seqlen = None
    prompt_tokens: PromptTokens = None
    windows: Windows = None
    haystack: HaystackFile = "prose"
    qa_file: QaFile = None
    templates: Templates = "auto"
    chat_template: ChatTemplate = False
    data_dir: DataDir = None
    num_fewshot: Fewshot = None
    max_length: MaxLength = None
    max_new_tokens: MaxNewTokens = None
    truncation: Truncation = "left"
    save_prompts: SavePrompts = False
    batch_size: Batch = None

    def settings(self, prefill: str, computing: opt.Computing) -> EvaluationSettings:
        """The evaluation's settings; UsageError for what cannot be evaluated."""
        from kvq_cli.evaluation.settings import EvaluationSettings

        return EvaluationSettings(
            tasks=opt.names(self.task, "--task"),
            contexts=None if self.context is None else opt.numbers(self.context, "--context"),
            limit=self.limit,
            seed=computing.seed,
            prefill=prefill,
            backend=computing.backend,
            dataset=self.dataset,
            seqlen=self.seqlen,
            prompt_tokens=self.prompt_tokens,
            windows=self.windows,
            templates=self.templates,
            chat_template=self.chat_template,
            haystack=self.haystack,
            qa_files=tuple(self.qa_file or ()),
            batch_size=self.batch_size,
            save_prompts=self.save_prompts,
            data_dir=None if self.data_dir is None else str(self.data_dir),
            num_fewshot=self.num_fewshot,
            max_length=self.max_length,
            max_new_tokens=self.max_new_tokens,
            truncation=self.truncation,
        )


@dataclass(frozen=True)
class Files:
    """Where results go, and which of those there are used."""

    out: Out = None
    store: Store = None
    plot: Plot = None
    fresh: Fresh = False

    def folder(self, model: str) -> Path:
        """The folder of results; KvqError or UsageError where something cannot be written."""
        from kvq_cli.files import check_writable
        from kvq_cli.paths import short_name

        folder = self.out or Path("results") / short_name(model)
        check_writable(folder)
        if self.store is not None:
            check_writable(self.store, "--store")
        if self.plot is not None:
            from kvq_cli.figures import check_format

            check_format(self.plot)
            check_writable(self.plot.parent, "--plot")
        return folder


@grouped
def evaluate(
    samples: Samples, subjects: Subjects, files: Files, computing: opt.Computing, reporting: opt.Reporting
) -> None:
    """Score methods with a compressed cache: RULER, perplexity, tasks of lm-eval; run again to go on where it stopped.

    With --json: lm-eval's result document; of several methods, one for each under `methods`.
    """
    output = reporting.output()
    from kvq_cli.evaluation.compared_methods import compared_methods
    from kvq_cli.evaluation.runner import evaluate as run
    from kvq_cli.models import load_model

    settings = samples.settings(subjects.prefill, computing)
    compared = compared_methods(_chosen(computing.model, subjects))
    folder = files.folder(computing.model)
    loaded = load_model(computing.model, computing.device, computing.dtype)
    try:
        with output.progress() as progress:
            track = _tracker(progress)
            document = run(loaded, compared, settings, folder, store=files.store, fresh=files.fresh, track=track)
    except KeyboardInterrupt:
        output.note(f"finished samples are kept in {files.store or folder}: the same command goes on from there")
        raise
    _print_table(output, **document["table"])
    if files.plot is not None:
        from kvq_cli.evaluation.plot import plot_comparison

        plot_comparison(document, files.plot)
        output.note(f"wrote {files.plot}")
    _print_notes(output, document, folder)
    single = next(iter(document["methods"].values()))
    output.result(single if len(compared) == 1 else document)


def _print_notes(output: Output, document: dict, folder: Path) -> None:
    """Say which backend computed, where results are, and what the evaluations have to say."""
    by_backend: dict[str, list[str]] = {}
    for label, results in document["methods"].items():
        by_backend.setdefault(results["config"]["backend"], []).append(label)
    for backend, labels in by_backend.items():
        methods = f": {', '.join(labels)}" if len(by_backend) > 1 else ""
        output.note(f"attention while decoding by {backend}{methods}")
    output.note(f"results of this run: {folder / 'comparison.json'}; of each method: its folder beside it")
    configs = next(iter(document["methods"].values()))["configs"]
    for note in (config["note"] for config in configs.values() if "note" in config):
        output.note(note)


def _chosen(model: str, subjects: Subjects) -> list[Method | Artifact]:
    """The methods and artifacts that the flags name."""
    from kvq_cli.cli.resolve import resolve, resolve_compared

    options, artifacts = opt.method_options(subjects.set_), subjects.artifact or []
    if subjects.compare is None and len(artifacts) < 2:
        return [resolve(model, subjects.method, subjects.bits, artifacts[0] if artifacts else None, options)]
    flag = "--compare" if subjects.compare is not None else "several --artifact"
    if subjects.method:
        raise UsageError(f"{flag} with --method: --method is for a single method; drop one of the two")
    names = opt.names(subjects.compare, "--compare") if subjects.compare else []
    return resolve_compared(model, names, subjects.bits, artifacts, options)


def _tracker(progress: Progress) -> Callable[[str, int, int], Callable[[int], None]]:
    def track(what: str, total: int, done: int) -> Callable[[int], None]:
        bar = progress.add_task(what, total=total, completed=done)
        return lambda count: progress.advance(bar, count)

    return track


def _print_table(output: Output, columns: list[str], rows: list[list]) -> None:
    if len(columns) > MAX_COLUMNS:
        columns, *rows = [list(line) for line in zip(columns, *rows, strict=True)]
    output.table(columns, rows)

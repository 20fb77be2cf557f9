"""`kvq eval` (also `kvq evaluate`): compare methods by perplexity, KL divergence, RULER and tasks of lm-eval."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kvq_cli.cli import eval_rules as rules
from kvq_cli.cli import options as opt
from kvq_cli.cli.command_line import command_line
from kvq_cli.cli.option_groups import grouped
from kvq_cli.cli.output import Output
from kvq_cli.cli.rules import HelpAll, Rule, unless
from kvq_cli.errors import UsageError
from kvq_cli.evaluation.lm_eval.task_groups import GROUPS

if TYPE_CHECKING:
    from rich.progress import Progress

    from kvq_cli.artifact import Artifact
    from kvq_cli.evaluation.settings import EvaluationSettings
    from kvq_cli.methods.base import Method

MAX_COLUMNS = 10
"""Wider tables are transposed: one column per method."""

_comparison = partial(typer.Option, rich_help_panel="Tasks and methods")
_samples = partial(typer.Option, rich_help_panel="Samples")

Tasks = Annotated[
    str,
    _comparison(
        "--task",
        "--tasks",
        metavar="NAME,...",
        help="perplexity, drift (divergence over a long answer), ruler (13 tasks), a single task of RULER, or "
        "lm_eval:NAME for any task of lm-eval; those of "
        "the papers are " + ", ".join(group.name for group in GROUPS) + ".",
    ),
]
Compare = Annotated[
    str | None,
    _comparison(
        "--compare",
        metavar="NAME,...",
        help="Methods to compare on the same samples, like fp16,kivi,kivi-4bit:residual=32, or artifacts; "
        "--bits and --set apply to all methods that have the option.",
    ),
]
Artifacts = Annotated[
    list[Path] | None,
    typer.Option(
        "--artifact",
        metavar="DIR",
        help="Folder of a calibrated artifact, or USER/REPO[@REVISION] on the Hugging Face Hub; repeatable (default: "
        f"{opt.DEFAULT_ARTIFACT}).",
        rich_help_panel=opt.METHOD,
    ),
]
Samples = Annotated[
    int | None,
    _samples(
        "--samples",
        min=1,
        help="Number of samples of each task: windows of each text, prompts, documents (default: 500 for RULER, 4 for "
        "drift, else all).",
    ),
]
Datasets = Annotated[
    str,
    _samples(
        "--dataset",
        metavar="NAME,...",
        help="Perplexity, drift: prose, pydoc, wikitext2, c4, ptb or files (.txt, .jsonl[:FIELD]; perplexity: "
        "or self); of several, "
        "each and their mean.",
    ),
]
Seqlen = Annotated[
    str | None,
    _samples(
        "--seqlen",
        metavar="N,...",
        help="Tokens per sample: of a window (perplexity; default: 2048), of a prompt and its answer (RULER: 4096, "
        "or several lengths; drift: 2560). The built-in model: 1024.",
    ),
]
PromptTokens = Annotated[
    int | None,
    _samples(
        "--prompt-tokens",
        min=1,
        help="Perplexity, drift: length of each window's prompt, to which methods fit their state; only the tokens "
        "after it are scored (default: half of the window; drift: a fifth).",
    ),
]
HaystackFile = Annotated[
    str,
    _samples(
        "--haystack",
        metavar="FILE",
        help="RULER: text to hide needles in: prose (built-in Wikipedia prose, not RULER's essays) or a file.",
    ),
]
QaFile = Annotated[
    list[Path] | None,
    _samples(
        "--qa-file",
        metavar="FILE",
        help="RULER: questions in the format of SQuAD (qa_1) or HotpotQA (qa_2); repeatable (default: synthetic "
        "questions about invented facts).",
    ),
]
Templates = Annotated[
    Literal["auto", "standard", "reference"],
    _samples(
        "--templates",
        help="RULER: prompt templates, RULER's own (standard) or the built-in model's (reference); auto: by model.",
    ),
]
ChatTemplate = Annotated[
    bool | None,
    _samples(
        "--chat-template/--no-chat-template",
        help="RULER, lm_eval: apply the tokenizer's chat template (default: where it has one; of lm_eval, for tasks "
        "that generate answers only: multiple choice and other log-likelihoods score plain text).",
    ),
]
SavePrompts = Annotated[
    bool, _samples("--save-prompts", help="RULER: write full prompts to the sample files, not only hashes.")
]
Out = Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Result folder (default: results/MODEL).")]
Store = Annotated[
    Path | None,
    typer.Option(
        "--store", metavar="DIR", help="Folder of finished samples, shared by all runs that use it (default: --out)."
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Plot scores over measured bits into a .png, .pdf or .svg file."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Ignore finished samples and evaluate everything again.")]
DataDir = Annotated[
    Path | None,
    _samples(
        "--data-dir",
        metavar="DIR",
        help="Local copies of data sets, used instead of the Hub: DIR/gsm8k/test.jsonl, DIR/wikitext2/test.txt, ...",
    ),
]
Fewshot = Annotated[
    int | None,
    _samples("--num-fewshot", min=0, help="lm_eval: number of few-shot examples (default: the task's)."),
]
MaxLength = Annotated[
    int | None,
    _samples(
        "--max-length",
        min=2,
        help="lm_eval: maximum tokens of prompt and answer (default: the model's context length).",
    ),
]
MaxNewTokens = Annotated[
    int | None, _samples("--max-new-tokens", min=1, help="lm_eval: maximum tokens of an answer (default: the task's).")
]
Truncation = Annotated[
    Literal["left", "middle"],
    _samples("--truncation", help="lm_eval: where long prompts are truncated; LongBench uses middle."),
]
Batch = Annotated[
    int | None, typer.Option("--batch-size", min=1, help="Prompts per batch (default: about 8192 tokens).")
]


@dataclass(frozen=True)
class MethodOptions:
    """The methods to evaluate."""

    compare: Compare = None
    method: opt.MethodOrDefault = None
    bits: opt.Bits = None
    artifact: Annotated[Artifacts, Rule(rules.artifact_notes)] = None
    set_: opt.Set = None
    prefill: opt.Prefill = "compressed"


@dataclass(frozen=True)
class TaskOptions:
    """The tasks and their samples."""

    task: Tasks = "perplexity"
    samples: Samples = None
    seqlen: Annotated[Seqlen, rules.not_lm_eval] = None
    dataset: Annotated[Datasets, rules.only_texts] = "prose"
    prompt_tokens: Annotated[PromptTokens, rules.only_texts] = None
    haystack: Annotated[HaystackFile, rules.only_essays] = "prose"
    qa_file: Annotated[QaFile, Rule(rules.question_notes)] = None
    templates: Annotated[Templates, rules.only_ruler] = "auto"
    chat_template: Annotated[ChatTemplate, unless(rules.answers, "perplexity and drift score plain text")] = None
    data_dir: Annotated[DataDir, rules.only_hub] = None
    num_fewshot: Annotated[Fewshot, rules.only_lm_eval] = None
    max_length: Annotated[MaxLength, rules.only_lm_eval] = None
    max_new_tokens: Annotated[MaxNewTokens, rules.only_lm_eval] = None
    truncation: Annotated[Truncation, rules.only_lm_eval] = "left"
    save_prompts: Annotated[SavePrompts, rules.only_ruler] = False
    batch_size: Annotated[Batch, unless(rules.answers, "perplexity and drift score one window at a time")] = None

    def settings(self, prefill: str, model_options: opt.ModelOptions) -> EvaluationSettings:
        """Settings of the evaluation; UsageError for options that cannot work."""
        from kvq_cli.data.texts import check_dataset
        from kvq_cli.evaluation.settings import EvaluationSettings

        datasets = opt.names(self.dataset, "--dataset")
        for dataset in datasets:
            check_dataset(dataset)
        return EvaluationSettings(
            tasks=opt.names(self.task, "--task"),
            samples=self.samples,
            seqlens=None if self.seqlen is None else opt.numbers(self.seqlen, "--seqlen"),
            seed=model_options.seed,
            prefill=prefill,
            backend=model_options.backend,
            datasets=datasets,
            prompt_tokens=self.prompt_tokens,
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
class ResultOptions:
    """Result files, and whether finished samples are reused."""

    out: Out = None
    store: Store = None
    plot: Annotated[Plot, rules.drawn] = None
    fresh: Fresh = False

    def folder(self, model: str) -> Path:
        """The result folder; KvqError or UsageError if one of the outputs cannot be written."""
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


@dataclass(frozen=True)
class _ModelOptions(opt.ModelOptions):
    """The model, and the seed of samples."""

    seed: Annotated[opt.Seed, rules.random] = 0


@grouped
def evaluate(
    tasks: TaskOptions,
    methods: MethodOptions,
    results: ResultOptions,
    worker_options: opt.WorkerOptions,
    model_options: _ModelOptions,
    output_options: opt.OutputOptions,
    _help_all: HelpAll = False,
) -> None:
    """Evaluate methods with a compressed cache: perplexity, RULER, tasks of lm-eval. Run again to resume.

    With --json: lm-eval's result document, or for several methods one document each under `methods`.

    --help-all shows the options that --help leaves out.
    """
    output = output_options.output()
    # Wrong options are reported before PyTorch is imported.
    settings = tasks.settings(methods.prefill, model_options)
    resolved = _resolve_methods(model_options, methods)
    document = evaluated(resolved, settings, results, worker_options, model_options, output, command_line())
    from kvq_cli.evaluation.runs import describe_run

    _print_table(output, **document["table"], title=describe_run(next(iter(document["methods"].values()))))
    if results.plot is not None:
        output.note(f"wrote {results.plot}")
    _print_notes(output, document, results.folder(model_options.model))
    for warning in evaluation_warnings(document):
        output.warn(warning)
    output.result(single_result(document))


def evaluated(
    methods: Sequence[Method | Artifact],
    settings: EvaluationSettings,
    results: ResultOptions,
    worker_options: opt.WorkerOptions,
    model_options: opt.LoadOptions,
    output: Output,
    command: str,
) -> dict[str, Any]:
    """Evaluate the methods; returns the results of each by label under `methods`, and their `table`.

    command: what started this, for the record of the run. output: for progress and notes.
    """
    folder = results.folder(model_options.model)
    from kvq_cli.evaluation.compared_methods import compared_methods
    from kvq_cli.evaluation.runner import evaluate as run

    compared = compared_methods(methods)
    settings.check_tasks()
    loaded = model_options.load()
    finished: list[int] = []  # numbers of samples that this run finishes, one after another
    try:
        with worker_options.connected(loaded.model.device.type) as workers, output.progress() as progress:
            document = run(
                loaded,
                compared,
                settings,
                folder,
                store=results.store,
                fresh=results.fresh,
                command=command,
                track=tracker(progress, finished.append),
                overall=tracker(progress),
                note=None if output.quiet else output.note,
                workers=workers,
            )
    except KeyboardInterrupt:
        # Before its first sample, a run with --fresh may not have discarded the earlier ones.
        again = "the same command without --fresh" if results.fresh and finished else "the same command"
        output.note(f"finished samples are kept in {results.store or folder}: run {again} to resume")
        raise
    if results.plot is not None:
        from kvq_cli.evaluation.plot import plot_comparison

        plot_comparison(document, results.plot)
    return document


def evaluation_warnings(document: Mapping[str, Any]) -> Iterator[str]:
    """Name methods that failed, and those that were calibrated on the text that scores them."""
    for label, message in document.get("failed", {}).items():
        yield f"left out: {label}: {message}"
    for label, result in document["methods"].items():
        for dataset, what in result["config"].get("seen_texts", {}).items():
            yield f"{label} was {what}: {dataset}; scores on unseen text are worse: choose another --dataset"


def single_result(document: dict[str, Any]) -> dict[str, Any]:
    """Return the result of a single method in lm-eval's schema; of several, the whole document."""
    several = len(document["methods"]) + len(document.get("failed", {})) > 1
    return document if several else next(iter(document["methods"].values()))


evaluate.everyday = (  # type: ignore[attr-defined]  # functions have it at run time
    *("task", "compare", "method", "bits", "artifact", "set_"),
    *("model", "device", "dataset", "seqlen", "samples", "out"),
)


def _print_notes(output: Output, document: dict[str, Any], folder: Path) -> None:
    """Print notes on the attention backend, the result files and the evaluations."""
    from kvq_cli.evaluation.chat_template import chat_template_note

    by_backend: dict[str, list[str]] = {}
    for label, result in document["methods"].items():
        by_backend.setdefault(result["config"]["backend"], []).append(label)
    for backend, labels in by_backend.items():
        methods = f": {', '.join(labels)}" if len(by_backend) > 1 else ""
        output.note(f"decode attention: {backend}{methods}")
    single = next(iter(document["methods"].values()))
    number = single["config"]["run"]["id"]
    output.note(f"results: {folder / 'runs' / str(number)}.json; `kvq results {folder} --run {number}` prints them")
    model = single["config"]["model_args"]
    if model.get("trust_remote_code"):
        output.note(f"model: {model['name']}, with its own Python code (--trust-remote-code)")
    if chat_template := chat_template_note(single["config"]["chat_template"]):
        output.note(chat_template)
    for note in (config["note"] for config in single["configs"].values() if "note" in config):
        output.note(note)


def _resolve_methods(model_options: opt.ModelOptions, methods: MethodOptions) -> list[Method | Artifact]:
    """The methods and artifacts given by the options."""
    from kvq_cli.resolve import resolve, resolve_compared

    options, artifacts = opt.method_options(methods.set_), methods.artifact or []
    model, trusted = model_options.model, model_options.trust_remote_code
    if methods.compare is None and len(artifacts) < 2:
        given = artifacts[0] if artifacts else None
        return [resolve(model, methods.method, methods.bits, given, options, trust_remote_code=trusted)]
    flag = "--compare" if methods.compare is not None else "several --artifact"
    if methods.method:
        raise UsageError(f"{flag} with --method: use one of them")
    names = [] if methods.compare is None else opt.names(methods.compare, "--compare")
    return resolve_compared(model, names, methods.bits, artifacts, options, trust_remote_code=trusted)


def tracker(
    progress: Progress, report: Callable[[int], None] = lambda count: None
) -> Callable[[str, int, int], Callable[[int], None]]:
    """A `base.Tracker` that draws bars; report: called with each number of newly finished samples."""

    def track(description: str, total: int, done: int) -> Callable[[int], None]:
        bar = progress.add_task(description, total=total, completed=done)

        def advance(count: int) -> None:
            report(count)
            progress.advance(bar, count)

        return advance

    return track


def _print_table(output: Output, columns: list[str], rows: list[list[Any]], title: str) -> None:
    if len(columns) > MAX_COLUMNS:
        columns, *rows = [list(line) for line in zip(columns, *rows, strict=True)]
    output.table(columns, rows, title)

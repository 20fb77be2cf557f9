"""What to evaluate: the settings of a run, checked, and the evaluations that they name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvq_cli.data.texts import SELF, evaluation_windows, load_text, sampled_windows
from kvq_cli.errors import UsageError
from kvq_cli.evaluation.base import Evaluation
from kvq_cli.evaluation.lm_eval.names import PREFIX, is_lm_eval, lm_eval_names
from kvq_cli.evaluation.lm_eval.tasks import load_tasks, require_lm_eval
from kvq_cli.evaluation.perplexity import PerplexityEvaluation
from kvq_cli.evaluation.ruler.evaluation import RulerEvaluation
from kvq_cli.evaluation.ruler.families import Sources
from kvq_cli.evaluation.ruler.haystack import Haystack
from kvq_cli.evaluation.ruler.questions import question_source
from kvq_cli.evaluation.ruler.tasks import TASKS
from kvq_cli.evaluation.ruler.templates import templates

if TYPE_CHECKING:
    from kvq_cli.models import LoadedModel

RULER, PERPLEXITY = "ruler", "perplexity"
CONTEXT, SEQLEN = 4096, 2048
"""Lengths of RULER and of perplexity where none is given, or the model's own where that is shorter."""
SELF_WINDOWS = 16


@dataclass(frozen=True)
class Settings:
    """Options of an evaluation; None stands for the default that its comment names.

    tasks: `perplexity`, `ruler`, any of RULER's tasks, or `lm_eval:` and one of lm-eval's; limit: samples (windows) of
    each task; prefill: how a prompt attends to itself (perplexity and log-likelihoods measure nothing unless it is
    compressed); backend: who computes attention while decoding; data_dir: where local copies of data sets lie.
    """

    tasks: Sequence[str]
    contexts: Sequence[int] | None = None  # 4096, or the model's own length; the built-in model: 1024
    limit: int | None = None  # RULER: 500; perplexity: all windows
    windows: int | None = None  # perplexity: limit
    seed: int = 0
    prefill: str = "compressed"
    backend: str = "auto"
    dataset: str = "prose"
    seqlen: int | None = None  # 2048, or the model's own length; the built-in model: 1024
    templates: str = "auto"
    chat_template: bool = False
    haystack: str = "prose"
    qa_files: Sequence[Path] = ()
    batch_size: int | None = None  # as many prompts as make 8192 tokens
    save_prompts: bool = False
    data_dir: str | None = None  # the Hub
    num_fewshot: int | None = None  # as the task says
    max_length: int | None = None  # of lm-eval's prompts with their answers: the model's own length
    max_new_tokens: int | None = None  # of lm-eval's answers: as the task says
    truncation: str = "left"

    def __post_init__(self) -> None:
        for name in self.tasks:
            if name not in (RULER, PERPLEXITY, *TASKS) and not is_lm_eval(name):
                valid = ", ".join((RULER, PERPLEXITY, *TASKS))
                raise UsageError(f"unknown task {name!r}; valid: {valid}, {PREFIX}NAME with any task of lm-eval")
            if is_lm_eval(name):
                require_lm_eval(name)
        if self.data_dir is not None and not Path(self.data_dir).is_dir():
            raise UsageError(f"--data-dir {self.data_dir}: no such folder")
        if PERPLEXITY in self.tasks and self.prefill != "compressed":
            raise UsageError(
                f"--prefill {self.prefill} with --task perplexity measures nothing: its one forward pass would attend "
                "to uncompressed keys and values; drop the flag or the task"
            )

    @property
    def ruler_tasks(self) -> list[str]:
        return list(TASKS) if RULER in self.tasks else [name for name in TASKS if name in self.tasks]


def evaluations(settings: Settings, loaded: LoadedModel) -> list[Evaluation]:
    """All evaluations that the settings name, ready to run; every mistake in the settings shows here."""
    found: list[Evaluation] = [*_ruler(settings, loaded)] if settings.ruler_tasks else []
    found += _lm_eval(settings, loaded)
    return found + ([_perplexity(settings, loaded)] if PERPLEXITY in settings.tasks else [])


def _ruler(settings: Settings, loaded: LoadedModel) -> Iterator[Evaluation]:
    if settings.chat_template and not loaded.tokenizer.chat_template:
        raise UsageError(f"--chat-template: the tokenizer of {loaded.name} has none; drop the flag")
    wording = templates(settings.templates, loaded.name)
    essay = Haystack(load_text(settings.haystack, "evaluation"), settings.haystack)
    sources = Sources(essay, question_source(settings.qa_files, settings.seed))
    for context in settings.contexts or [loaded.default_length(CONTEXT)]:
        _check_length("--context", context, loaded)
        for name in settings.ruler_tasks:
            yield RulerEvaluation(
                TASKS[name],
                context,
                loaded,
                wording,
                sources,
                seed=settings.seed,
                limit=settings.limit,
                prefill=settings.prefill,
                chat=settings.chat_template,
                batch_size=settings.batch_size,
                save_prompts=settings.save_prompts,
            )


def _lm_eval(settings: Settings, loaded: LoadedModel) -> list[Evaluation]:
    names = lm_eval_names(settings.tasks)
    if not names:
        return []
    _check_length("--max-length", settings.max_length or 0, loaded)
    tasks = load_tasks(names, settings.data_dir and Path(settings.data_dir), settings.num_fewshot, settings.seed)
    from kvq_cli.evaluation.lm_eval.evaluation import LmEvalEvaluation  # imports lm-eval

    return [
        LmEvalEvaluation(
            task,
            loaded,
            seed=settings.seed,
            limit=settings.limit,
            prefill=settings.prefill,
            chat=settings.chat_template,
            batch_size=settings.batch_size,
            max_length=settings.max_length,
            new_tokens=settings.max_new_tokens,
            truncation=settings.truncation,
            group=PREFIX + names.get(group.name, group.name),
            weighted=group.weighted,
        )
        for task, group in tasks.items()
    ]


def _perplexity(settings: Settings, loaded: LoadedModel) -> Evaluation:
    seqlen = settings.seqlen or loaded.default_length(SEQLEN)
    _check_length("--seqlen", seqlen, loaded)
    if seqlen < 2:
        raise UsageError(f"--seqlen {seqlen}: a window needs 2 tokens at least")
    if settings.dataset == SELF:
        windows = sampled_windows(
            loaded.model, loaded.tokenizer, seqlen, settings.windows or settings.limit or SELF_WINDOWS, settings.seed
        )
    else:
        folder = settings.data_dir and Path(settings.data_dir)
        windows = evaluation_windows(loaded.tokenizer, settings.dataset, seqlen, settings.seed, folder)
    return PerplexityEvaluation(windows, settings.dataset, settings.windows or settings.limit)


def _check_length(flag: str, length: int, loaded: LoadedModel) -> None:
    if length > loaded.context:
        raise UsageError(f"{flag} {length}: {loaded.name} was made for {loaded.context} tokens at most")

"""Settings of an evaluation run, their validation, and the evaluations built from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvq_cli.data.texts import SELF, evaluation_windows, load_text, sampled_windows, text_name, unknown_token
from kvq_cli.errors import UsageError, did_you_mean
from kvq_cli.evaluation.base import DRIFT, PERPLEXITY, Evaluation, Tracker
from kvq_cli.evaluation.chat_template import uses_chat_template
from kvq_cli.evaluation.lm_eval.task_groups import GROUPS, PREFIX, is_lm_eval, requested_tasks
from kvq_cli.evaluation.lm_eval.tasks import check_names, load_tasks, require_lm_eval
from kvq_cli.evaluation.ruler.families import Sources
from kvq_cli.evaluation.ruler.haystack import Haystack
from kvq_cli.evaluation.ruler.questions import question_source
from kvq_cli.evaluation.ruler.tasks import RULER, TASKS
from kvq_cli.evaluation.ruler.templates import select_templates

if TYPE_CHECKING:
    from kvq_cli.models import LoadedModel

DEFAULT_CONTEXT, DEFAULT_SEQLEN = 4096, 2048
"""Default tokens of RULER's prompts and of perplexity windows, limited by the model's context length."""
SELF_WINDOWS = 16  # default number of windows sampled from the model itself
DRIFT_LENGTH, DRIFT_PROMPTS = 2560, 4  # default tokens of a prompt and its answer, a fifth of them the prompt


@dataclass(frozen=True)
class EvaluationSettings:
    """Options of an evaluation run; None selects the default given in the comment.

    tasks:    `perplexity`, `drift`, `ruler`, a task of RULER, or `lm_eval:NAME`.
    samples:  of each task: windows of each text, prompts, documents.
    seqlens:  tokens of a sample: of a window, of a prompt and its answer. RULER takes several, other tasks one.
    prefill:  how prompt tokens attend to each other, "compressed" or "exact".
    backend:  implementation of decode attention, "auto", "triton" or "torch".
    datasets: texts for perplexity; of several, each is scored, and their mean.
    data_dir: folder with local copies of data sets.
    """

    tasks: Sequence[str]
    samples: int | None = None  # RULER: 500; drift: 4; other tasks: all
    seqlens: Sequence[int] | None = None  # RULER: 4096; drift: 2560; perplexity: 2048; the built-in model: 1024
    seed: int = 0
    prefill: str = "compressed"
    backend: str = "auto"
    datasets: Sequence[str] = ("prose",)
    prompt_tokens: int | None = None  # of each window of perplexity: half of it
    templates: str = "auto"
    chat_template: bool | None = None  # where the tokenizer has one; lm-eval: for tasks that generate alone
    haystack: str = "prose"
    qa_files: Sequence[Path] = ()
    batch_size: int | None = None  # 8192 tokens of prompts
    save_prompts: bool = False
    data_dir: str | None = None  # the Hub
    num_fewshot: int | None = None  # set by the task
    max_length: int | None = None  # lm-eval, prompt and answer: the model's context length
    max_new_tokens: int | None = None  # lm-eval: set by the task
    truncation: str = "left"

    def __post_init__(self) -> None:
        for name in self.tasks:
            if name not in (RULER, PERPLEXITY, DRIFT, *TASKS) and not is_lm_eval(name):
                raise _unknown_task(name)
            if is_lm_eval(name):
                require_lm_eval(name)
        if len(self.seqlens or ()) > 1 and (single := [name for name in self.tasks if name in (PERPLEXITY, DRIFT)]):
            lengths = ",".join(map(str, self.seqlens or ()))
            raise UsageError(f"--seqlen {lengths}: {single[0]} takes one length: give RULER's tasks a run of their own")
        if self.data_dir is not None and not Path(self.data_dir).is_dir():
            raise UsageError(f"--data-dir {self.data_dir}: no such folder")

    def check_tasks(self) -> None:
        """UsageError for a task that lm-eval does not have. Importing lm-eval and indexing all of its tasks takes
        seconds."""
        if requested := requested_tasks(self.tasks):
            check_names(requested)

    @property
    def seqlen(self) -> int | None:
        """The one length of perplexity and drift."""
        return self.seqlens[0] if self.seqlens else None

    @property
    def ruler_tasks(self) -> list[str]:
        return list(TASKS) if RULER in self.tasks else [name for name in TASKS if name in self.tasks]


def _unknown_task(name: str) -> UsageError:
    own = (RULER, PERPLEXITY, DRIFT, *TASKS)
    hint = did_you_mean(name, own) or did_you_mean(name, [group.name for group in GROUPS], PREFIX)
    return UsageError(f"unknown task {name!r}; valid: {', '.join(own)}, {PREFIX}NAME with any task of lm-eval{hint}")


def build_evaluations(settings: EvaluationSettings, loaded: LoadedModel, track: Tracker) -> list[Evaluation]:
    """Build all requested evaluations; UsageError or KvqError for every setting that cannot work with the model.

    track: shows the progress of fitting RULER's prompts to each context, which takes seconds where it is long.
    """
    evaluations: list[Evaluation] = [*_ruler(settings, loaded, track)] if settings.ruler_tasks else []
    evaluations += _lm_eval(settings, loaded)
    evaluations += [_drift(settings, loaded)] if DRIFT in settings.tasks else []
    return evaluations + ([*_perplexity(settings, loaded)] if PERPLEXITY in settings.tasks else [])


def _ruler(settings: EvaluationSettings, loaded: LoadedModel, track: Tracker) -> Iterator[Evaluation]:
    from kvq_cli.evaluation.ruler.evaluation import RulerEvaluation  # imports PyTorch

    chat = uses_chat_template(loaded, settings.chat_template)
    templates = select_templates(settings.templates, loaded.name)
    essay = Haystack(load_text(settings.haystack, "evaluation"), settings.haystack)
    sources = Sources(essay, question_source(settings.qa_files, settings.seed))
    contexts = settings.seqlens or [loaded.default_length(DEFAULT_CONTEXT)]
    advance = track("fitting RULER's prompts", len(contexts) * len(settings.ruler_tasks), 0)
    for context in contexts:
        _check_length("--seqlen", context, loaded)
        for name in settings.ruler_tasks:
            yield RulerEvaluation(
                TASKS[name],
                context,
                loaded,
                templates,
                sources,
                seed=settings.seed,
                limit=settings.samples,
                prefill=settings.prefill,
                chat=chat,
                batch_size=settings.batch_size,
                save_prompts=settings.save_prompts,
                group=RULER,
            )
            advance(1)


def _lm_eval(settings: EvaluationSettings, loaded: LoadedModel) -> list[Evaluation]:
    requested = requested_tasks(settings.tasks)
    if not requested:
        return []
    _check_length("--max-length", settings.max_length or 0, loaded)
    tasks = load_tasks(requested, _data_dir(settings), settings.num_fewshot, settings.seed)
    from kvq_cli.evaluation.lm_eval.evaluation import LmEvalEvaluation  # imports lm-eval

    return [
        LmEvalEvaluation(
            task,
            loaded,
            seed=settings.seed,
            limit=settings.samples,
            prefill=settings.prefill,
            chat=settings.chat_template,
            batch_size=settings.batch_size,
            num_fewshot=settings.num_fewshot,
            max_length=settings.max_length,
            new_tokens=settings.max_new_tokens,
            truncation=settings.truncation,
            groups={PREFIX + given: group.weighted for group in groups for given in requested[group.name]},
        )
        for task, groups in tasks.items()
    ]


def _perplexity(settings: EvaluationSettings, loaded: LoadedModel) -> Iterator[Evaluation]:
    from kvq_cli.evaluation.perplexity import PerplexityEvaluation  # imports PyTorch

    seqlen = settings.seqlen or loaded.default_length(DEFAULT_SEQLEN)
    _check_length("--seqlen", seqlen, loaded)
    if seqlen < 2:
        raise UsageError(f"--seqlen {seqlen}: a window needs 2 tokens at least")
    prompt_tokens = settings.prompt_tokens or seqlen // 2
    if not prompt_tokens < seqlen:
        raise UsageError(f"--prompt-tokens {prompt_tokens}: windows of {seqlen} tokens leave none to score")
    names = [text_name(dataset) for dataset in settings.datasets]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"--dataset: several texts are named {', '.join(sorted(twice))}")
    for dataset, name in zip(settings.datasets, names, strict=True):
        unscored = None if dataset == SELF else unknown_token(loaded.tokenizer)
        if dataset == SELF:
            count = settings.samples or SELF_WINDOWS
            windows = sampled_windows(loaded.model, loaded.tokenizer, seqlen, count, settings.seed)
        else:
            windows = evaluation_windows(loaded.tokenizer, dataset, seqlen, settings.seed, _data_dir(settings))
        yield PerplexityEvaluation(
            windows,
            dataset,
            settings.samples,
            prompt_tokens,
            settings.prefill,
            name if len(names) > 1 else None,
            unscored,
        )


def _drift(settings: EvaluationSettings, loaded: LoadedModel) -> Evaluation:
    import torch

    from kvq_cli.evaluation.drift import PARTS, DriftEvaluation

    length = settings.seqlen or loaded.default_length(DRIFT_LENGTH)
    _check_length("--seqlen", length, loaded)
    prompt_tokens = settings.prompt_tokens or max(1, length // 5)
    if length - prompt_tokens < PARTS:
        raise UsageError(
            f"--seqlen {length}: drift needs an answer of {PARTS} tokens behind {prompt_tokens} of a prompt"
        )
    if SELF in settings.datasets:
        raise UsageError(f"--dataset {SELF}: drift continues prompts of a text; give prose, pydoc or a text file")
    each = settings.samples or DRIFT_PROMPTS
    prompts = [
        evaluation_windows(loaded.tokenizer, dataset, prompt_tokens, settings.seed, _data_dir(settings))[:each]
        for dataset in settings.datasets
    ]
    answer = length - prompt_tokens
    return DriftEvaluation(torch.cat(prompts), ",".join(settings.datasets), answer, settings.prefill, settings.seed)


def _data_dir(settings: EvaluationSettings) -> Path | None:
    return None if settings.data_dir is None else Path(settings.data_dir)


def _check_length(flag: str, length: int, loaded: LoadedModel) -> None:
    if length > loaded.context:
        raise UsageError(f"{flag} {length}: the context length of {loaded.name} is {loaded.context} tokens")

"""Which options of `kvq eval` the tasks of a run read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from kvq_cli.cli import options as opt
from kvq_cli.cli.rules import Values, unless
from kvq_cli.evaluation.lm_eval.task_groups import is_lm_eval

if TYPE_CHECKING:
    from kvq_cli.evaluation.ruler.tasks import RulerTask

#: Tasks on texts.
_TEXTS = ("perplexity", "drift")


def _families(values: Values) -> list[str]:
    """Of each name of `--task`: perplexity, drift, lm_eval or ruler."""
    names = ("lm_eval" if is_lm_eval(name) else name for name in opt.listed(values["task"]))
    return [name if name in (*_TEXTS, "lm_eval") else "ruler" for name in names]


def answers(values: Values) -> bool:
    """Whether a task has prompts, instead of windows of text."""
    return not {*_families(values)} <= {*_TEXTS}


def _scores(values: Values, *texts: str) -> bool:
    """Whether one of these texts is read."""
    return bool({*_TEXTS} & {*_families(values)}) and any(name in texts for name in opt.listed(values["dataset"]))


def _draws(values: Values) -> bool:
    """Whether the evaluation has what `--plot` draws."""
    drawn = [name for name in opt.listed(values["task"]) if not is_lm_eval(name)]
    return len(drawn) > 1 or drawn in (["perplexity"], ["ruler"])


def _ruler_tasks(values: Values) -> list[RulerTask]:
    from kvq_cli.evaluation.ruler.tasks import TASKS

    names = opt.listed(values["task"])
    return [task for name, task in TASKS.items() if name in names or "ruler" in names]


def question_notes(values: Values, flag: str) -> Iterator[str]:
    """Files of questions that no task reads."""
    from kvq_cli.evaluation.ruler.questions import question_format

    read = {task.args["dataset"] for task in _ruler_tasks(values) if task.family == "qa"}
    if not read:
        yield f"{flag} has no effect: only qa_1 and qa_2 read it"
        return
    for path in values["qa_file"]:
        if (held := question_format(Path(path))) not in read:
            name, task = {"squad": ("SQuAD", "qa_1"), "hotpotqa": ("HotpotQA", "qa_2")}[held]
            yield f"{flag} {path} has no effect: only {task} reads the format of {name}"


def artifact_notes(values: Values, flag: str) -> Iterator[str]:
    """Artifacts of methods or bits that `--compare` does not name: they are compared, too."""
    from kvq_cli.artifact import is_artifact
    from kvq_cli.methods.registry import parse
    from kvq_cli.resolve import fits_bits

    if values["compare"] is None:
        return
    named = [parse(text) for text in opt.listed(values["compare"]) if not is_artifact(text)]
    for folder in values["artifact"] or []:
        name, own = opt.artifact_method(folder)
        wanted = [options.get("bits", values["bits"]) for other, options in named if other == name]
        if not any(fits_bits(name, bits, own.get("bits")) for bits in wanted):
            label = f"{name}-{own['bits']:g}bit" if own else name
            yield f"{flag} {folder}: --compare does not name {label}, which is compared, too"


only_texts = unless(lambda values: bool({*_TEXTS} & {*_families(values)}), "only perplexity and drift read it")
only_ruler = unless(lambda values: "ruler" in _families(values), "only tasks of RULER read it")
only_lm_eval = unless(lambda values: "lm_eval" in _families(values), "only tasks of lm-eval read it")
not_lm_eval = unless(
    lambda values: not {*_families(values)} <= {"lm_eval"}, "tasks of lm-eval set the length of their prompts"
)
only_essays = unless(
    lambda values: any(task.args.get("haystack") == "essay" for task in _ruler_tasks(values)),
    "only RULER's tasks with essays read it",
)
only_hub = unless(
    lambda values: "lm_eval" in _families(values) or _scores(values, "wikitext2", "c4", "ptb"),
    "no task reads a data set of the Hub",
)
random = unless(
    lambda values: answers(values) or "drift" in _families(values) or _scores(values, "c4", "self"),
    "nothing is drawn at random",
)
drawn = unless(_draws, "it draws perplexity and RULER's mean; evaluate --task perplexity or ruler", refuse=True)

"""Which options each command reads: an option that has no effect is announced, or refused.

`RULES` has every option of every command: `read`, or the rule that says when the command does not read it. Only options
that were given, by flag or `--config`, are announced.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from kvq_cli.errors import KvqError, UsageError

Values = Mapping[str, Any]
"""The values of a command's parameters, by parameter name."""
WITHOUT_CODE = ("reference", "smollm2")
"""Models that come with kvq: they have no Python code of their own."""
HUB_TEXTS = ("wikitext2", "c4", "ptb")


@dataclass(frozen=True)
class Rule:
    """notes: sentences about a given option that has no effect, or on some methods only, from the command's values and
    the flag. refuse: raise UsageError with them, because the request contradicts itself."""

    notes: Callable[[Values, str], Sequence[str]]
    refuse: bool = False


def unless(reads: Callable[[Values], bool], why: str, refuse: bool = False) -> Rule:
    """The rule of an option that the command reads if `reads` says so."""
    return Rule(lambda values, flag: [] if reads(values) else [f"{flag} has no effect: {why}"], refuse)


class AnnouncingCommand(TyperCommand):
    """A command that announces, before it runs, the options that it will not read."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        for note in unused(_path(ctx), ctx.params, given_options(ctx), {p.name: p.opts[0] for p in self.params}):
            if not ctx.params.get("quiet"):
                print(f"note: {note}", file=sys.stderr)
        return super().invoke(ctx)


def _path(ctx: Any) -> str:
    """The name below `kvq` of a context's command: `eval`, `bench generate`."""
    parent = ctx.parent
    own = str(ctx.command.name)
    return own if parent is None or parent.parent is None else f"{_path(parent)} {own}"


def unused(command: str, values: Values, given: Sequence[str], flags: Mapping[str, str]) -> list[str]:
    """Notes on the given options that the command does not read; UsageError if the request contradicts itself.

    command: `eval`, `bench generate`, ...; given, flags: names of parameters, and the flag of each.
    """
    notes: list[str] = []
    for name in given:
        rule = RULES.get(command, {}).get(name)
        if rule is None:
            continue
        try:
            found = rule.notes(values, flags[name])
        except (KvqError, ValueError):  # an invalid value, which the command reports
            continue
        if found and rule.refuse:
            raise UsageError(found[0])
        notes += found
    return notes


def given_options(ctx: typer.Context) -> list[str]:
    """Names of the parameters that the command line or `--config` gave."""
    # Older versions of typer call a list that was left out given, and empty.
    return [name for name, value in ctx.params.items() if _is_given(ctx, name) and value not in (None, [], ())]


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name in ("COMMANDLINE", "DEFAULT_MAP")


# -- conditions ---------------------------------------------------------------------------------------------------


def _tasks(values: Values) -> list[str]:
    """The evaluation's tasks, those of RULER by name."""
    from kvq_cli.evaluation.ruler.tasks import TASKS

    names = [name.strip() for name in values["task"].split(",")]
    return [name for name in names if name != "ruler"] + (list(TASKS) if "ruler" in names else [])


def _perplexity(values: Values) -> bool:
    return "perplexity" in _tasks(values)


def _lm_eval(values: Values) -> bool:
    return any(name.startswith("lm_eval:") for name in _tasks(values))


def _ruler(values: Values) -> bool:
    return any(name != "perplexity" and not name.startswith("lm_eval:") for name in _tasks(values))


def _ruler_tasks(values: Values) -> list[Any]:
    """The evaluation's tasks of RULER."""
    from kvq_cli.evaluation.ruler.tasks import TASKS

    return [TASKS[name] for name in _tasks(values) if name in TASKS]


def _essays(values: Values) -> bool:
    """Whether a task hides needles in essays."""
    return any(task.args.get("haystack") == "essay" for task in _ruler_tasks(values))


def _texts(*names: str) -> Callable[[Values], bool]:
    """Whether perplexity is evaluated on one of these texts."""
    return lambda values: _perplexity(values) and any(name.strip() in names for name in values["dataset"].split(","))


def _any(*conditions: Callable[[Values], bool]) -> Callable[[Values], bool]:
    return lambda values: any(condition(values) for condition in conditions)


def _draws(values: Values) -> bool:
    """Whether the evaluation has what `--plot` draws."""
    return _perplexity(values) or sum(1 for name in _tasks(values) if not name.startswith("lm_eval:")) > 1


def _compresses(values: Values) -> bool:
    """Whether one of the methods is not fp16."""
    if values.get("compare") is not None:
        return bool(values.get("artifact")) or any(name.strip() != "fp16" for name in values["compare"].split(","))
    return values.get("method") != "fp16" or bool(values.get("artifact"))


def _reads_text(values: Values) -> bool:
    """Whether calibrating the method reads text, instead of factorizing weights."""
    from kvq_cli.benchmarking.shapes import SHAPES

    return _calibrated(values).calibration(SHAPES["llama-3.1-8b"].model_shape()).reads_text


def _captures(values: Values) -> bool:
    """Whether calibrating the method captures keys, values and gradients on text, to cluster them."""
    from kvq_cli.benchmarking.shapes import SHAPES

    return _calibrated(values).calibration(SHAPES["llama-3.1-8b"].model_shape()).captures


def _weighted(values: Values) -> bool:
    """Whether k-means is weighted by squared gradients."""
    return _captures(values) and values.get("fisher", True) and getattr(_calibrated(values), "fisher", True)


def _calibrated(values: Values) -> Any:
    from kvq_cli.cli.options import method_options
    from kvq_cli.methods.registry import build

    bits = {} if values["bits"] is None else {"bits": values["bits"]}
    return build(values["method"] or "temporalkv", **method_options(values["set_"]), **bits)


def _runs_model(values: Values) -> bool:
    """Whether the study of `kvq analyze` passes text through a model."""
    from kvq_cli.papers.studies.study import ModelStudy, study_class

    return values["name"] is not None and issubclass(study_class(values["name"]), ModelStudy)


# -- options of several methods ----------------------------------------------------------------------------------


def _shared_notes(values: Values, flag: str) -> Iterator[str]:
    """Which of the compared methods an option of `--set` or `--bits` does not reach."""
    from kvq_cli.cli.options import method_options
    from kvq_cli.methods.registry import has_option, parse

    if values.get("compare") is None:
        return
    named = {text: _named(text.strip()) if _is_artifact(text) else parse(text.strip()) for text in _compared(values)}
    for key in ["bits"] if flag == "--bits" else method_options(values["set_"]):
        shown = flag if flag == "--bits" else f"--set {key}"
        own = [text for text, (name, options) in named.items() if has_option(name, key) and key in options]
        lacking = [text for text, (name, _) in named.items() if name != "fp16" and not has_option(name, key)]
        reading = [text for text, (name, _) in named.items() if has_option(name, key) and text not in own]
        if not reading and (own or key == "bits"):
            yield f"{shown} has no effect: " + (f"set in {', '.join(own)}" if own else "no method has it")
        elif reading and (own or lacking):
            missing = [f"{', '.join(lacking)} (no such option)"] * bool(lacking) + [
                f"{', '.join(own)} (its own)"
            ] * bool(own)
            yield f"{shown} applies to {', '.join(reading)}; not to {' and '.join(missing)}"


def _compared(values: Values) -> list[str]:
    return [text.strip() for text in values["compare"].split(",")]


def _is_artifact(text: str) -> bool:
    return (Path(text) / "config.json").is_file()


def _named(folder: str | Path) -> tuple[str, dict[str, Any]]:
    """Name and bits of an artifact's method, from its config alone. Raises KvqError for a damaged one, which is
    reported when it is loaded."""
    from kvq_cli.artifact import read_config
    from kvq_cli.artifact.schema import check_form

    method = read_config(Path(folder))["method"]
    bits = {"bits": method["bits"]} if "bits" in method else {}
    check_form({"name": method.get("name"), **bits}, {"name": str, "bits?": float}, f"{folder}: method")
    return method["name"], bits


def _question_notes(values: Values, flag: str) -> Iterator[str]:
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


def _artifact_notes(values: Values, flag: str) -> Iterator[str]:
    """Artifacts of methods or bits that `--compare` does not name: they are compared, too."""
    from kvq_cli.cli.resolve import fits_bits
    from kvq_cli.methods.registry import parse

    if values["compare"] is None:
        return
    named = [parse(text) for text in _compared(values) if not _is_artifact(text)]
    for folder in values["artifact"] or []:
        name, own = _named(folder)
        if not any(
            name == other and fits_bits(options.get("bits", values["bits"]), own.get("bits"))
            for other, options in named
        ):
            label = f"{name}-{own['bits']:g}bit" if own else name
            yield f"{flag} {folder}: --compare does not name {label}, which is compared, too"


# -- the table ---------------------------------------------------------------------------------------------------

read = Rule(lambda values, flag: [])
_shared = Rule(lambda values, flag: list(_shared_notes(values, flag)))
_artifacts = Rule(lambda values, flag: list(_artifact_notes(values, flag)))
_code = unless(lambda values: values["model"] not in WITHOUT_CODE, "the model has no Python code of its own")
_prefill = unless(
    lambda values: _compresses(values) or bool(values.get("load_cache")),  # a saved cache is of one kind of prefill
    "fp16 compresses nothing",
)


def _all_read(*names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, read)


def _rules(rule: Rule, *names: str) -> dict[str, Rule]:
    return dict.fromkeys(names, rule)


_only_perplexity = unless(_perplexity, "only perplexity reads it")
_only_ruler = unless(_ruler, "only tasks of RULER read it")
_only_lm_eval = unless(_lm_eval, "only tasks of lm-eval read it")
_sampled = unless(lambda values: values["temperature"] > 0, "decoding is greedy without --temperature")
_generates = unless(lambda values: values["save_cache"] is None, "--save-cache generates nothing")
_text = unless(_reads_text, "the method factorizes weights and reads no text")
_clusters = unless(_captures, "the method factorizes weights and clusters nothing")
_grows = unless(lambda values: values["grow"], "it needs --grow", refuse=True)
_random = unless(lambda values: values["random"] is not None, "it needs --random", refuse=True)
_not_random = unless(lambda values: values["random"] is None, "--random replaces the model: use one", refuse=True)
_not_shapes = unless(lambda values: values["shapes"] is None, "--shapes replaces the model: use one", refuse=True)
_timed = unless(lambda values: not (values["static"] or values["check"]), "nothing is timed")
_named_study = unless(lambda values: values["name"] is not None, "studies are listed without NAME")
_model_study = unless(_runs_model, "only a study of a model reads it")
_not_papers = unless(lambda values: not values["papers"], "--papers counts the papers' sizes")
_shown = unless(lambda values: not values["runs"], "--runs lists runs")


def _either(*rules: Rule) -> Rule:
    """The notes of the first rule that has any."""
    return Rule(
        lambda values, flag: next((found for rule in rules if (found := rule.notes(values, flag))), []),
        any(rule.refuse for rule in rules),
    )


_made = unless(
    lambda values: bool(values["names"] or values["everything"]), "without NAME or --all, targets are listed"
)

RULES: dict[str, dict[str, Rule]] = {
    "eval": {
        **_all_read("task", "compare", "method", "out", "store", "fresh", "workers", "ray"),
        **_all_read("model", "device", "dtype", "backend", "config", "as_json", "quiet"),
        **_rules(_shared, "bits", "set_"),
        **_rules(_only_perplexity, "dataset", "seqlen", "prompt_tokens", "windows"),
        **_rules(_only_ruler, "context", "templates", "save_prompts"),
        **_rules(_only_lm_eval, "num_fewshot", "max_length", "max_new_tokens", "truncation"),
        "artifact": _artifacts,
        "prefill": _prefill,
        "limit": unless(
            lambda values: values["windows"] is None or _ruler(values) or _lm_eval(values), "--windows replaces it"
        ),
        "haystack": unless(_essays, "only RULER's tasks with essays read it"),
        "qa_file": Rule(lambda values, flag: list(_question_notes(values, flag))),
        "chat_template": unless(_any(_ruler, _lm_eval), "perplexity scores plain text"),
        "batch_size": unless(_any(_ruler, _lm_eval), "perplexity scores one window at a time"),
        "data_dir": unless(_any(_lm_eval, _texts(*HUB_TEXTS)), "no task reads a data set of the Hub"),
        "seed": unless(_any(_ruler, _lm_eval, _texts("c4", "self")), "nothing is drawn at random"),
        "plot": unless(
            _draws, "it draws perplexity and RULER's mean; evaluate --task perplexity or ruler", refuse=True
        ),
        "trust_remote_code": _code,
    },
    "generate": {
        **_all_read("prompt", "file", "raw", "system", "prefill_chunk", "save_cache", "load_cache"),
        **_all_read("method", "bits", "artifact", "set_"),
        **_rules(_generates, "num_beams", "max_new_tokens", "temperature", "top_p", "top_k"),
        **_all_read("model", "device", "dtype", "backend", "config", "as_json", "quiet"),
        "prefill": _prefill,
        "seed": _either(_generates, _sampled),
        "trust_remote_code": _code,
    },
    "chat": {
        **_all_read("system", "max_new_tokens", "temperature", "top_p", "top_k", "prefill_chunk"),
        **_all_read("method", "bits", "artifact", "set_", "model", "device", "dtype", "backend", "config", "quiet"),
        "prefill": _prefill,
        "seed": _sampled,
        "trust_remote_code": _code,
    },
    "serve": {
        **_all_read("method", "bits", "artifact", "set_", "dry_run", "model", "dtype", "quiet"),
        "trust_remote_code": _code,
    },
    "calibrate": {
        **_all_read("method", "bits", "set_", "fisher", "dry_run", "model", "device", "dtype"),
        **_all_read("config", "as_json", "quiet"),
        **_rules(_text, "dataset", "samples", "seqlen", "seed"),
        **_rules(_either(_text, _clusters), "gradients", "points", "iterations", "kmeans", "disk"),
        **_rules(unless(lambda values: not values["dry_run"], "--dry-run writes nothing"), "out", "resume", "force"),
        "captured": _either(
            _text, _clusters, unless(lambda values: not values["dry_run"], "--dry-run captures nothing")
        ),
        "damping": _either(_text, unless(_weighted, "k-means is not weighted by gradients")),
        **_rules(
            _either(
                unless(_captures, "the method factorizes weights, in one process"),
                unless(lambda values: not values["dry_run"], "--dry-run runs nothing"),
            ),
            "workers",
            "ray",
        ),
        "trust_remote_code": _code,
    },
    "tune": {
        **_all_read(
            "budget", "objective", "candidates", "text", "windows", "text_seqlen", "rounds", "swaps", "minutes"
        ),
        **_all_read("set_", "out", "dataset", "samples", "seqlen", "gradients", "points", "iterations", "kmeans"),
        **_all_read("damping", "disk", "captured", "resume", "force", "model", "device", "dtype", "seed"),
        **_all_read("config", "as_json", "quiet"),
        "kl": unless(lambda values: values["objective"] == "memory", "only --objective memory has a goal for KL"),
        "trust_remote_code": _code,
    },
    "bench generate": {
        **_all_read("compare", "context", "batch", "tokens", "grow", "random", "out_dir"),
        **_all_read("device", "dtype", "backend", "seed", "config", "as_json", "quiet"),
        **_rules(_grows, "seconds", "resume"),
        **_rules(_not_random, "model", "trust_remote_code"),
        "layers": _random,
        "rounds": unless(lambda values: not values["grow"], "--grow times one round"),
        "set_": _shared,
        "bits": Rule(lambda values, flag: list(_shared_notes(values, flag)) if values["grow"] else []),
        "prefill": _prefill,
    },
    "bench calibrate": {
        **_all_read("method", "bits", "set_", "random", "out_dir", "device", "dtype", "seed"),
        **_all_read("config", "as_json", "quiet"),
        **_rules(_not_random, "model", "trust_remote_code"),
        **_rules(_text, "samples", "seqlen"),
        "dataset": _text,
        "layers": _random,
    },
    "bench kernels": {
        **_all_read("operation", "static", "config", "as_json", "quiet"),
        **_rules(_timed, "seconds", "resume"),
        **_rules(unless(lambda values: not values["static"], "--static runs no kernel"), "check", "dry", "device"),
        "target": read,  # refused without --static by the command
        "out_dir": unless(lambda values: values["static"] or not values["check"], "--check writes nothing"),
    },
    "bench tune": _all_read("operation", "seconds", "dry", "out_dir", "device", "config", "as_json", "quiet"),
    "bench report": _all_read("folder", "config", "as_json", "quiet"),
    "analyze": {
        **_all_read("name", "config", "as_json", "quiet"),
        **_rules(_named_study, "set_", "out_dir"),
        **_rules(_model_study, "dataset", "samples", "seqlen", "model", "trust_remote_code", "device", "dtype", "seed"),
    },
    "inspect": _all_read("artifact", "plot", "as_json"),
    "methods": _all_read("name", "as_json"),
    "bits": {
        **_all_read("papers", "as_json"),
        **_rules(_not_papers, "compare", "method", "shapes", "context", "batch"),
        **_rules(_either(_not_papers, _shared), "bits", "set_"),
        **_rules(_either(_not_papers, _not_shapes), "model", "trust_remote_code"),
    },
    "plan": {
        **_all_read("memory", "gpu", "compare", "shapes", "context", "batch", "engine", "reserve", "as_json"),
        **_all_read("tensor_parallel_size"),  # refused without --engine vllm
        **_rules(_shared, "bits", "set_"),
        **_rules(_not_shapes, "model", "trust_remote_code"),
    },
    "results": {
        **_all_read("folder", "runs", "format", "as_json"),
        **_rules(_shown, "run", "baseline", "against", "plot"),
    },
    "report": {
        **_all_read("folder", "out", "errors", "baseline", "as_json", "quiet"),
        "artifact": unless(lambda values: values["errors"], "--no-errors leaves out artifacts: use one", refuse=True),
    },
    "reproduce": {
        **_all_read("names", "everything", "fast", "model", "out", "as_json", "quiet"),
        **_rules(_made, "options", "store", "workers", "ray"),
        "trust_remote_code": _code,
    },
}

"""Commands as Python functions, on a model by name or one that is loaded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvq_cli.cli import calibrate as _calibrate
from kvq_cli.cli import eval as _eval
from kvq_cli.cli import recommend as _recommend
from kvq_cli.cli.function_options import Held, arguments_of
from kvq_cli.cli.output import Output
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import parse

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvq_cli.artifact import Artifact
    from kvq_cli.methods.base import Method
    from kvq_cli.models import LoadedModel


def calibrate(
    model: str | PreTrainedModel,
    method: str | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quiet: bool = True,
    **options: Any,
) -> Artifact:
    """Calibrate a method for a model and write its artifact, as `kvq calibrate` does.

    model: a name as for `load_model`, or a model of transformers, with its `tokenizer`.
    method: name, bits and options, like "klt-2.25bit:join_keys=on"; None: that of the command.
    quiet: False: print progress and notes to stderr.
    options: those of `kvq calibrate`, with its defaults: `dataset`, `samples`, `seqlen`, `out`, `resume`, .... A model
    that was made in memory has no name: it needs `out`, the artifact's folder.

    Raises UsageError for what does not fit the model or the text, or an artifact that is in the way; KvqError where
    the calibration fails.
    """
    output = Output(quiet=quiet)  # before a library is imported, which it silences
    name, own = (None, {}) if method is None else parse(method)
    given = {"method": name, "bits": own.pop("bits", None), "set_": own}
    arguments = arguments_of(_calibrate.calibrate, options, _source(model, tokenizer), given)
    built = _calibrate.build_method(*(arguments[key] for key in ("method", "bits", "set_", "fisher")))
    data = arguments["data"]
    if data.out is None and not arguments["model_options"].model:
        raise UsageError("calibrate(): the model has no name: pass the artifact's folder, out=...")
    plan, folder = _calibrate.planned(built, data, arguments["disk"], arguments["model_options"])
    return _calibrate.calibrated(plan, folder, data, arguments["worker_options"], output)


def evaluate(
    model: str | PreTrainedModel,
    methods: str | os.PathLike | Method | Artifact | Sequence[str | os.PathLike | Method | Artifact],
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quiet: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Evaluate methods on the same samples, as `kvq eval` does, and return its JSON document.

    model, tokenizer, quiet: as for `calibrate`.
    methods: one or several, each as for `attach`; "fp16" compresses nothing.
    options: those of `kvq eval`, with its defaults: `task`, `dataset`, `samples`, `seqlen=[512, 1024]`, `out`, ....

    Returns the result in lm-eval's schema, `results["perplexity"]["perplexity,none"]`; of several methods, one by label
    under `methods`. Finished samples are kept in `out` and not evaluated again.
    Raises UsageError for tasks, methods or options that cannot work; KvqError where the evaluation fails.
    """
    output = Output(quiet=quiet)
    given = [methods] if isinstance(methods, str) or not isinstance(methods, Sequence) else list(methods)
    if not given:
        raise UsageError("evaluate(): name at least one method")
    names = [text for text in given if isinstance(text, str)]
    compare = {"compare": ",".join(names) if len(names) == len(given) else None}
    own = {**compare, "method": None, "bits": None, "artifact": None, "set_": None}
    arguments = arguments_of(_eval.evaluate, options, _source(model, tokenizer), own)
    tasks, results, prefill = arguments["tasks"], arguments["results"], arguments["methods"].prefill
    settings = tasks.settings(prefill, arguments["model_options"])
    loaded = arguments["model_options"].load()
    from kvq_cli.resolve import named

    def resolved(each: Any) -> Method | Artifact:
        return named(each, loaded.model, loaded.name) if isinstance(each, (str, os.PathLike)) else each

    document = _eval.evaluated(
        [resolved(each) for each in given],
        settings,
        results,
        arguments["worker_options"],
        Held.of(arguments["model_options"], loaded),
        output,
        "kvq_cli.evaluate",
    )
    for warning in _eval.evaluation_warnings(document):
        warnings.warn(warning, stacklevel=2)
    return _eval.single_result(document)


def recommend(
    model: str | PreTrainedModel,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    quiet: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Recommend a method for a model and a memory, as `kvq recommend` does, and return its JSON document.

    model, tokenizer, quiet: as for `calibrate`.
    options: those of `kvq recommend`, with its defaults: `memory="24GB"` or `gpu`, `context`, `users`, `dataset`, ....

    Returns the `recommended` method and the best `compressed` one by label, the `reason`, lines to `use`, and a row of
    each measured one in `methods`. Raises UsageError where nothing fits, with what would.
    """
    output = Output(quiet=quiet)
    arguments = arguments_of(_recommend.recommend, options, _source(model, tokenizer))
    keys = ("need_options", "dataset", "calibrate", "out", "model_options")
    needs, dataset, calibrates, out, loading = (arguments[key] for key in keys)
    found = _recommend.recommended(needs, dataset, calibrates, out, loading, output, "kvq_cli.recommend")
    return found.to_dict()


def _source(model: str | PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> str | LoadedModel:
    """Return the model's name, or the model with its tokenizer."""
    if isinstance(model, str):
        return model
    if tokenizer is None:
        raise UsageError("pass the model's tokenizer, too: tokenizer=...")
    from kvq_cli.models import LoadedModel, model_name, model_shape

    revision = getattr(model.config, "_commit_hash", None)
    return LoadedModel(model, tokenizer, model_name(model), revision, model_shape(model))

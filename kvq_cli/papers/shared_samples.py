"""One command for the samples of several targets whose methods answer the same prompts or score the same windows.

With exact prefill, the methods of a command share the pass over each prompt (`attention/shared_prompts.py`); where they
score windows, the uncompressed model's logits of each (`evaluation/perplexity.py`). Targets that run one after another
would each compute them again, and load the model on each worker. Their own commands then find all samples in the store.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvq_cli.evaluation.base import PERPLEXITY
from kvq_cli.papers.inputs import command_options
from kvq_cli.papers.targets import Target

#: Subfolder of the store for the documents of these commands.
FOLDER = "shared-samples"
#: Options that targets on the same samples may give differently: their methods and their outputs.
_OWN = ("--compare", "--set", "--out", "--plot")


def samples_of(target: Target, model: str) -> tuple[str, ...] | None:
    """The command without the target's methods and outputs: targets with an equal one evaluate the same samples.

    None where methods share no passes of the model: in tasks other than perplexity without exact prefill; and with
    --fresh, which uses no sample of another command.
    """
    if not target.eval or target.config:
        return None
    words, _ = _split(target.command(model))
    options = command_options(words)
    shares = options.get("prefill", [""])[-1] == "exact" or options.get("task") == [PERPLEXITY]
    if not shares or "fresh" in options:
        return None
    return tuple(words)


def samples_command(targets: Sequence[Target], model: str, store: Path) -> list[str]:
    """The arguments of `kvq` that evaluate each method of targets with equal `samples_of` once."""
    from kvq_cli.methods.registry import build_parsed

    # By the method that a text names: `kivi-2bit` and `kivi-2bit:residual=128` may be one.
    methods = {build_parsed(text): text for target in targets for text in _methods(target, model)}
    words, _ = _split(targets[0].command(model, store=store))
    return [*words, "--compare", ",".join(methods.values()), "--out", str(store / FOLDER)]


def _methods(target: Target, model: str) -> list[str]:
    """The target's methods, each with the `--set` options that it has."""
    from kvq_cli.methods.registry import has_option, parse

    _, own = _split(target.command(model))
    methods = []
    for text in target.rows(model).values():
        name, given = parse(text)
        keys = {pair: pair.partition("=")[0].replace("-", "_") for pair in own["--set"]}
        added = [pair for pair, key in keys.items() if has_option(name, key) and key not in given]
        methods.append(":".join([text, *added]))
    return methods


def _split(command: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """The words of a command without the options of `_OWN`, and the values of these."""
    left, own, words = list[str](), {name: list[str]() for name in _OWN}, iter(command)
    for word in words:
        name, equals, value = word.partition("=")
        if name in own:
            own[name].append(value if equals else next(words))
        else:
            left.append(word)
    return left, own

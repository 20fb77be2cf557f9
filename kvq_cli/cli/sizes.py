"""Shared by `kvq bits` and `kvq plan`: options, the size of a model, and a loop over the methods."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.output import Output
from kvq_cli.cli.rules import unless

if TYPE_CHECKING:
    from kvq_cli.methods.base import Method, ModelShape

T = TypeVar("T")
MAX_COUNT = 2**24
"""Maximum number of tokens or sequences: far larger sizes in bytes would overflow."""

Compare = Annotated[
    str | None,
    typer.Option("--compare", metavar="NAME,...", help="Methods, like kivi-4bit:residual=32 (default: all)."),
]
ShapeName = Annotated[
    str | None,
    typer.Option(
        "--shapes", metavar="NAME", help="Shape of a known model, instead of --model: llama-3.1-8b, llama-2-7b, ..."
    ),
]
ModelName = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="NAME",
        help="`reference`, `smollm2` or `gemma3-270m` (packages), a Hugging Face model id, a folder, or a .gguf file; "
        "only its config is read.",
    ),
]
Context = Annotated[int, typer.Option("--context", min=1, max=MAX_COUNT, help="Tokens per sequence.")]
Batch = Annotated[int, typer.Option("--batch", min=1, max=MAX_COUNT, help="Number of sequences.")]
not_shapes = unless(lambda values: values["shapes"] is None, "--shapes replaces the model: use one", refuse=True)


class ModelSize(NamedTuple):
    """Shape of a model, bytes of its weights in 16 bits, and its context length in tokens."""

    shape: ModelShape
    weights_bytes: int
    context: int


def model_size(name: str | None, model: str, trust_remote_code: bool = False) -> ModelSize:
    """Size of the known shape `name`, or of `model` by its configuration."""
    if name is not None:
        from kvq_cli.benchmarking.shapes import known_shape

        known = known_shape(name, "--shapes")
        return ModelSize(known.model_shape(), 2 * known.parameters, known.context)
    from kvq_cli.models import REFERENCE, configured_shape, parameters_and_context

    if model == REFERENCE:
        return _reference_size()
    # The shape first: it refuses models without a KV cache.
    shape = configured_shape(model, trust_remote_code=trust_remote_code)
    parameters, context = parameters_and_context(model, trust_remote_code=trust_remote_code)
    return ModelSize(shape, 2 * parameters, context)


def _reference_size() -> ModelSize:
    """Size of the built-in model, without transformers, whose import takes seconds."""
    from kvq_cli.benchmarking.shapes import SHAPES
    from kvq_cli.reference import model_path

    config, known = json.loads((model_path() / "config.json").read_text(encoding="utf-8")), SHAPES["reference"]
    return ModelSize(known.model_shape(config["dtype"]), 2 * known.parameters, config["max_position_embeddings"])


def chosen_methods(
    compare: str | None, bits: float | None, set_: list[str] | None, out: Output
) -> list[tuple[str, Method]]:
    """Label with bits, and method, of each that `compare` names, or of all.

    UsageError for a method that cannot have the options; one that was not named is left out with a note.
    """
    from kvq_cli.errors import UsageError
    from kvq_cli.methods.registry import build_parsed, check_shared, method_names, parse

    options = opt.method_options(set_) | ({} if bits is None else {"bits": bits})
    names = method_names() if compare is None else opt.names(compare, "--compare")
    if len(set(names)) < len(names):
        raise UsageError(f"--compare {compare}: names a method twice")
    check_shared((parse(text)[0] for text in names), options)
    chosen = []
    for text in names:
        try:
            method = build_parsed(text, **options)
        except UsageError as error:
            if compare:
                raise
            out.note(f"not counted: {error}")
            continue
        name, *own_options = text.split(":")
        suffix = f"-{method.bits:g}bit" if hasattr(method, "bits") else ""
        label = name if name.endswith(suffix) else name + suffix
        chosen.append((":".join([label, *own_options]), method))
    return chosen


def each_counted(
    chosen: list[tuple[str, Method]], named: bool, count: Callable[[Method], T], out: Output
) -> Iterator[tuple[str, T]]:
    """Yield `(label, count(method))` of the chosen methods.

    A method that does not support the shape raises its UsageError if it was named, else it is left out with a note.
    """
    from kvq_cli.errors import UsageError

    for label, method in chosen:
        try:
            counted = count(method)
        except UsageError as error:
            if named:
                raise
            out.note(f"not counted: {error}")
            continue
        yield label, counted

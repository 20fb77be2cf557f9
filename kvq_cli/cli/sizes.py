"""What `kvq bits` and `kvq plan` share: a model known by its numbers alone, and the methods to count."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, NamedTuple, TypeVar

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.output import Output

if TYPE_CHECKING:
    from kvq_cli.methods.base import Method, ModelShape

T = TypeVar("T")
MOST = 2**24
"""Tokens or sequences; sizes in bytes of far more overflow."""

Compare = Annotated[
    str | None,
    typer.Option("--compare", metavar="NAME,...", help="Methods like kivi-4bit:residual=32 (default: all there are)."),
]
ShapeName = Annotated[
    str | None,
    typer.Option("--shapes", metavar="NAME", help="A known model: llama-3.1-8b, llama-2-7b, ...; instead of --model."),
]
ModelName = Annotated[
    str, typer.Option("--model", metavar="NAME", help="`reference`, a Hugging Face id or a folder: its config is read.")
]
Context = Annotated[int, typer.Option("--context", min=1, max=MOST, help="Tokens of each sequence.")]
Batch = Annotated[int, typer.Option("--batch", min=1, max=MOST, help="Sequences.")]


class Sized(NamedTuple):
    """A model's numbers: shape, bytes of its weights in 16 bits, tokens that it was made for."""

    shape: ModelShape
    weights: int
    limit: int


def size_of(name: str | None, model: str) -> Sized:
    """Of the known shape `name`, or else of what the configuration of `model` says."""
    if name is not None:
        from kvq_cli.benchmarking.shapes import CONTEXT, known_shape

        known = known_shape(name, "--shapes")
        return Sized(known.model_shape(), 2 * known.parameters, CONTEXT)
    from kvq_cli.models import configured_shape, parameters_and_context

    shape = configured_shape(model)  # first: it refuses what has no key-value cache
    parameters, context = parameters_and_context(model)
    return Sized(shape, 2 * parameters, context)


def for_each(
    chosen: str | None, bits: int | None, set_: list[str] | None, count: Callable[[Method], T], out: Output
) -> Iterator[tuple[str, T]]:
    """(label that says the bits, what `count` gives) of each method of `chosen`, or of all there are.

    A method that does not fit is left out with a note where all were asked for, else its UsageError is raised.
    """
    from kvq_cli.errors import UsageError
    from kvq_cli.methods.registry import build_parsed, check_shared, method_names, parse

    options = opt.method_options(set_) | ({} if bits is None else {"bits": bits})
    names = method_names() if chosen is None else opt.names(chosen, "--compare")
    if len(set(names)) < len(names):
        raise UsageError(f"--compare {chosen}: names a method twice")
    check_shared((parse(text)[0] for text in names), options)
    for text in names:
        try:
            method = build_parsed(text, **options)
            counted = count(method)
        except UsageError as error:
            if chosen:
                raise
            out.note(f"not counted: {error}")
            continue
        name, *own = text.split(":")
        has_bits = hasattr(method, "bits") and not name.endswith(f"-{method.bits}bit")
        yield ":".join([f"{name}-{method.bits}bit" if has_bits else name, *own]), counted

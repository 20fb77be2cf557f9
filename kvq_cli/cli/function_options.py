"""Options of a command for a Python function: given by name, with the command's own defaults and checks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from typing import TYPE_CHECKING, Any

import typer
from typer.main import get_command

from kvq_cli.cli import options as opt
from kvq_cli.cli.failures import explain
from kvq_cli.cli.option_groups import with_groups
from kvq_cli.cli.rules import AnnouncingCommand, given_options, unused
from kvq_cli.cli.sizes import ModelSize
from kvq_cli.errors import KvqError, UsageError

if TYPE_CHECKING:
    from kvq_cli.models import LoadedModel

#: Parameters of commands that print, which functions do not; their `model`, they take as an argument.
_NOT_OPTIONS = {"model", "as_json", "quiet", "dry_run"}
#: Options that say how a model is loaded.
_LOADING = {"device", "dtype", "trust_remote_code", "accept_license"}


def arguments_of(
    command: Callable[..., None],
    options: Mapping[str, Any],
    model: str | LoadedModel,
    own: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the arguments of a `grouped` command's function: `options` by name, with values as in a `--config` file,
    others by default.

    own: options that the caller takes as arguments of its own. Warns of options that have no effect. Raises UsageError
    for an unknown option or a wrong value.
    """

    @wraps(command)
    def values(**converted: Any) -> Any:
        return converted

    name, own = command.__name__, dict(own or {})
    single = typer.Typer(add_completion=False)
    single.command(name, cls=AnnouncingCommand)(values)
    parser: Any = get_command(single)
    context, where = typer.Context(parser, info_name=name), f"{name}()"
    loaded = None if isinstance(model, str) else model
    opt.as_defaults(context, options, where, hidden={*_NOT_OPTIONS, *own, *(_LOADING if loaded else ())})
    opt.as_defaults(context, {**own, "model": (loaded.name or None) if loaded else model}, where)
    try:
        context = parser.make_context(name, [], default_map=context.default_map)
        notes = unused(parser, context.params, given_options(context))
    except KvqError:
        raise
    except Exception as error:  # of typer: a value that the option does not take
        raise UsageError(f"{where}: {explain(error)[0]}") from error
    for note in notes:
        warnings.warn(note, stacklevel=3)
    # `wraps` sets __wrapped__ at run time
    arguments = with_groups(command.__wrapped__, parser.callback(**context.params))  # type: ignore[attr-defined]
    return {**arguments, "model_options": Held.of(arguments["model_options"], loaded)} if loaded else arguments


@dataclass(frozen=True)
class Held(opt.ModelOptions):
    """Options of a model that is loaded already."""

    loaded: LoadedModel | None = None

    @classmethod
    def of(cls, options: opt.LoadOptions, loaded: LoadedModel) -> Held:
        """Return the other options as they are."""
        kept = {field.name: getattr(options, field.name) for field in fields(options)}
        trusted = {"trust_remote_code": loaded.trust_remote_code}
        return cls(**{**kept, **trusted, "model": loaded.name, "loaded": loaded})

    def load(self) -> LoadedModel:
        assert self.loaded is not None
        return self.loaded

    def size(self) -> ModelSize:
        loaded = self.load()
        weights = sum(parameter.nbytes for parameter in loaded.model.parameters())
        return ModelSize(loaded.shape, weights, loaded.context)

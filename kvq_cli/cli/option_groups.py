"""Commands that take dataclasses of options instead of dozens of parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def grouped(function: Callable[..., None]) -> Callable[..., None]:
    """Decorator: expose the fields of a command's dataclass parameters to typer as options.

    Each field must be annotated as a typer option and have a default; field names must be unique over all groups.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}
    parameters = []
    for name, parameter in signature(function).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
            continue
        options = get_type_hints(groups[name], include_extras=True)
        parameters += [
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=options[field.name])
            for field in fields(groups[name])
        ]

    @wraps(function)
    def command(**given: Any) -> None:
        objects = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        function(**objects, **given)

    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # functions have it at run time
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command

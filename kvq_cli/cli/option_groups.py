"""Commands that take dataclasses of options instead of dozens of parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints


def groups_of(function: Callable[..., Any]) -> dict[str, type]:
    """Return the dataclasses of options among a function's parameters, by name."""
    hints = get_type_hints(function)
    return {name: hint for name, hint in hints.items() if isinstance(hint, type) and is_dataclass(hint)}


def with_groups(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a function by name, of which `values` has the fields of its dataclasses of options."""
    values = dict(values)
    objects = {
        name: group(**{field.name: values.pop(field.name) for field in fields(group)})
        for name, group in groups_of(function).items()
    }
    return {**objects, **values}


def grouped(function: Callable[..., None]) -> Callable[..., None]:
    """Decorator: expose the fields of a command's dataclass parameters to typer as options.

    Each field must be annotated as a typer option and have a default; field names must be unique over all groups.
    What a parameter is annotated with beside its group, `Annotated[Group, rule]`, annotates each field.
    """
    hints = get_type_hints(function, include_extras=True)
    groups = groups_of(function)
    parameters = []
    for name, parameter in signature(function).parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(annotation=hints[name], kind=Parameter.KEYWORD_ONLY))
            continue
        options = get_type_hints(groups[name], include_extras=True)
        for field in fields(groups[name]):
            option = options[field.name]
            for rule in getattr(hints[name], "__metadata__", ()):
                option = Annotated[option, rule]
            parameters.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=option))

    @wraps(function)
    def command(**given: Any) -> None:
        function(**with_groups(function, given))

    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # functions have it at run time
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command

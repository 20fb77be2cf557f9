"""Commands that take dataclasses of options instead of dozens of parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints


def grouped(function: Callable[..., None]) -> Callable[..., None]:
    """Decorator: expose the fields of a command's dataclass parameters to typer as options.

    Each field must be annotated as a typer option and have a default; field names must be unique over all groups.
    What a parameter is annotated with beside its group, `Annotated[Group, rule]`, annotates each field.
    """
    hints = get_type_hints(function, include_extras=True)
    plain = get_type_hints(function)
    groups = {name: hint for name, hint in plain.items() if isinstance(hint, type) and is_dataclass(hint)}
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
        objects = {
            name: group(**{field.name: given.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        function(**objects, **given)

    command.__signature__ = Signature(parameters)  # type: ignore[attr-defined]  # functions have it at run time
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command

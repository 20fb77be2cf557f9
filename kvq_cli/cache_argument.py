"""The cache among the arguments and outputs of transformers' models: `past_key_values`, which 5.24 renames to `cache`.

Callers of models of 5.24 may still use the old name, with a warning; outputs have the new one. So hooks, which see what
the caller wrote, look for both names, and calls and outputs use the one that the installed version defines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

_NAMES = ("past_key_values", "cache")


@cache
def cache_name() -> str:
    """Return the name of the cache in the installed transformers.

    Its outputs tell: a version would not, of a development build. They have a field of one of the names.
    """
    from transformers.modeling_outputs import CausalLMOutputWithPast

    return next(field.name for field in fields(CausalLMOutputWithPast) if field.name in _NAMES)


def cache_argument(value: Any) -> dict[str, Any]:
    """Return the keyword argument that passes a cache to a model or puts it into its output."""
    return {cache_name(): value}


def passed_cache(kwargs: Mapping[str, Any]) -> Any:
    """Return the cache among the keyword arguments of a call, None where there is none.

    Also under a name that the installed transformers lacks: a compressed cache that the model does not see is refused
    by the attention, and not left out.
    """
    names = (cache_name(), *_NAMES)
    return next((kwargs[name] for name in names if kwargs.get(name) is not None), None)


def without_cache(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of a call but for the cache."""
    return {name: value for name, value in kwargs.items() if name not in _NAMES}

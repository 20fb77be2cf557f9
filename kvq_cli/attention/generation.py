"""Which calls of transformers' `generate` take a compressed cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedModel

from kvq_cli.cache_argument import cache_name, passed_cache
from kvq_cli.errors import UsageError

#: transformers itself takes this one, of older models' files, for the default.
_DEFAULTS = (None, "hybrid")


def takes_new_cache(model: PreTrainedModel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether `model.generate(*args, **kwargs)` would make a cache itself. UsageError where one of a certain
    kind is asked for.

    An assistant keeps transformers' cache, from which assisted generation takes back rejected tokens of any number.
    """
    if passed_cache(kwargs) is not None:
        return False
    configs = (kwargs.get("generation_config", args[1] if len(args) > 1 else None), model.generation_config)

    def setting(name: str) -> Any:
        values = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
        return next((value for value in values if value is not None), None)

    if setting("use_cache") is False or setting("is_assistant"):
        return False
    if (kind := setting("cache_implementation")) not in _DEFAULTS:
        raise UsageError(
            f"cache_implementation={kind!r}: an attached model generates with its compressed cache: leave the option "
            f"out, or pass a cache as {cache_name()}"
        )
    return True

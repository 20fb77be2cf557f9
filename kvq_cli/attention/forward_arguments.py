"""What arguments of a model's forward mean to hooks that cut a pass into several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

#: Arguments with an entry for each column of the pass, and the dimension of these.
BY_COLUMN = {"input_ids": 1, "inputs_embeds": 1, "token_type_ids": 1, "mm_token_type_ids": 1}
BY_COLUMN |= {"position_ids": -1, "cache_position": -1}


def asked(model: PreTrainedModel, given: Mapping[str, Any], name: str) -> bool:
    """Return a switch of the forward, such as `return_dict`: the argument, or what the model's config says without."""
    value = given.get(name)
    return bool(getattr(model.config, name, False) if value is None else value)

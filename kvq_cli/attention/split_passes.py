"""Cut long passes over a compressed cache into short ones, where a token can only see what earlier passes packed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvq_cli.attention.replaced_attribute import replaced_attribute
from kvq_cli.cache_argument import passed_cache
from kvq_cli.errors import UsageError

if TYPE_CHECKING:
    from kvq_cli.attention.attention_hooks import AttentionHooks

#: Arguments of a model's forward with an entry for each column of the pass, and the dimension of the columns.
_BY_COLUMN = {"input_ids": 1, "inputs_embeds": 1, "position_ids": -1, "token_type_ids": 1, "cache_position": 0}
#: Arguments that ask for more than logits.
_UNSUPPORTED = ("output_hidden_states", "output_attentions", "labels")


@contextmanager
def split_passes(model: PreTrainedModel, hooks: AttentionHooks, columns: int) -> Iterator[None]:
    """Inside the block, `model(...)` computes passes of more than `columns` columns in parts, where their queries see
    what they would see in one-by-one decoding; the logits are those of all parts. UsageError for arguments that ask for
    more than logits."""
    forward = model.forward
    names = inspect.signature(forward)

    @wraps(forward)
    def in_parts(*args: Any, **kwargs: Any) -> Any:
        given = {**names.bind_partial(*args).arguments, **kwargs}
        cache, inputs = passed_cache(given), given.get("input_ids")
        inputs = given.get("inputs_embeds") if inputs is None else inputs
        if not isinstance(inputs, Tensor) or inputs.shape[1] <= columns:
            return forward(*args, **kwargs)
        if not hooks.owns(cache) or not hooks.sees_compressed(cache):
            return forward(*args, **kwargs)
        asked = [name for name in _UNSUPPORTED if given.get(name) is not None and given[name] is not False]
        if asked or given.get("return_dict") is False:
            raise UsageError(
                f"a pass of {inputs.shape[1]} tokens is computed {columns} at a time (recent), to logits alone: do not "
                f"pass {asked[0] if asked else 'return_dict=False'}, or give at most {columns} tokens"
            )
        return _joined(forward, given, inputs.shape[1], columns)

    with replaced_attribute(model, "forward", in_parts):
        yield


def _joined(forward: Any, given: dict[str, Any], columns: int, most: int) -> Any:
    """The output of the last part, with the logits of all."""
    past, keep = passed_cache(given).get_seq_length(), given.get("logits_to_keep")
    if isinstance(keep, Tensor):
        raise UsageError(f"a pass of {columns} tokens is computed {most} at a time: give logits_to_keep as a number")
    keep, logits = keep or columns, []
    for begin in range(0, columns, most):
        end = min(begin + most, columns)
        part = {name: _part(name, value, begin, end, past) for name, value in given.items()}
        kept = end - max(begin, columns - keep)
        if "logits_to_keep" in given:
            part["logits_to_keep"] = max(1, kept)
        output = forward(**part)
        if kept > 0:
            logits.append(output.logits)
    output.logits = torch.cat(logits, dim=1)
    return output


def _part(name: str, value: Any, begin: int, end: int, past: int) -> Any:
    """The argument for the columns [begin, end) of the pass."""
    if not isinstance(value, Tensor):
        return value
    if name == "attention_mask":
        return value[:, : past + end]
    dim = _BY_COLUMN.get(name)
    return value if dim is None else value.narrow(dim, begin, end - begin)

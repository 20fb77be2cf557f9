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

from kvq_cli.attention.forward_arguments import BY_COLUMN, asked
from kvq_cli.attention.replaced_attribute import replaced_attribute
from kvq_cli.cache_argument import passed_cache
from kvq_cli.errors import UsageError

if TYPE_CHECKING:
    from kvq_cli.attention.attention_hooks import AttentionHooks

#: Switches that ask for more than logits.
_UNSUPPORTED = ("output_hidden_states", "output_attentions")


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
        more = [name for name in _UNSUPPORTED if asked(model, given, name)]
        more += ["labels"] if given.get("labels") is not None else []
        more += [] if asked(model, given, "return_dict") else ["return_dict=False"]
        if more:
            raise UsageError(
                f"a pass of {inputs.shape[1]} tokens is computed {columns} at a time (recent), to logits alone: do not "
                f"pass {more[0]}, or give at most {columns} tokens"
            )
        if not _fits(given, cache.get_seq_length(), inputs.shape[1]):
            return forward(*args, **kwargs)  # which names what does not fit
        return _joined(forward, given, inputs.shape[1], columns)

    with replaced_attribute(model, "forward", in_parts):
        yield


def _joined(forward: Any, given: dict[str, Any], columns: int, most: int) -> Any:
    """The output of the last part, with the logits of all."""
    past, keep = passed_cache(given).get_seq_length(), given.get("logits_to_keep")
    if isinstance(keep, Tensor):
        raise UsageError(f"a pass of {columns} tokens is computed {most} at a time: give logits_to_keep as a number")
    keep, logits = keep or columns, []
    try:
        for begin in range(0, columns, most):
            end = min(begin + most, columns)
            part = {name: _part(name, value, begin, end, past) for name, value in given.items()}
            kept = end - max(begin, columns - keep)
            if "logits_to_keep" in given:
                part["logits_to_keep"] = max(1, kept)
            output = forward(**part)
            if kept > 0:
                logits.append(output.logits)
    except BaseException:  # the cache has a part of what the caller takes for one pass
        passed_cache(given).unfinished |= begin > 0
        raise
    output.logits = torch.cat(logits, dim=1)
    return output


def _fits(given: dict[str, Any], past: int, columns: int) -> bool:
    """Whether every argument has as many columns as the pass, or with those of the cache: a cut would hide it."""
    mask = given.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape[-1] != past + columns:
        return False
    cut = ((value, BY_COLUMN[name]) for name, value in given.items() if name in BY_COLUMN)
    return all(value.shape[dim] == columns for value, dim in cut if isinstance(value, Tensor))


def _part(name: str, value: Any, begin: int, end: int, past: int) -> Any:
    """The argument for the columns [begin, end) of the pass."""
    if not isinstance(value, Tensor):
        return value
    if name == "attention_mask":
        return value[:, : past + end]
    dim = BY_COLUMN.get(name)
    return value if dim is None else value.narrow(dim, begin, end - begin)

"""Passes of assisted generation: tokens of the text, then drafted ones, of which `generate` takes some back.

They give what plain decoding gives. Drafted tokens see what they would see decoded one by one, whatever `prefill` says,
and what they pack can be unpacked: the cache's rollback grows to their number. The first pass of `generate` has the
prompt and drafted tokens: it is run as two, since exact prefill is for the prompt, to which alone methods are fit.

transformers asks for the logits of the drafted tokens and of the one before them: that tells how many they are.
"""

from __future__ import annotations

import inspect
import threading
from contextlib import ExitStack
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvq_cli.attention.attention_hooks import AttentionHooks
from kvq_cli.errors import UsageError

#: Arguments with an entry for each column of the pass, and the dimension of these.
_BY_COLUMN = {"input_ids": 1, "inputs_embeds": 1, "token_type_ids": 1, "mm_token_type_ids": 1}
_BY_COLUMN |= {"position_ids": -1, "cache_position": -1}


class Drafts:
    """Hooks on the model, around those on its decoder, for caches that expect drafted tokens."""

    def __init__(self, model: PreTrainedModel, hooks: AttentionHooks) -> None:
        self._model, self._hooks, self._forward = model, hooks, model.forward
        self._thread = _Thread()

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self._forward)

    def install(self, undo: ExitStack) -> None:
        """Put the hooks on the model; `undo` removes them."""
        undo.callback(self._model.register_forward_pre_hook(self._before_forward, with_kwargs=True).remove)
        undo.callback(self._model.register_forward_hook(self._after_forward, with_kwargs=True).remove)

    def _before_forward(
        self, model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Announce the drafted tokens of a pass. Where a prompt comes before them, compute that now, and leave the
        drafted tokens to the pass."""
        cache = kwargs.get("past_key_values")
        if not self._hooks.owns(cache) or not cache.drafts:
            return None
        if "logits_to_keep" not in self._signature.parameters:
            raise UsageError(
                f"{type(model).__name__} takes no logits_to_keep, which tells drafted tokens from the prompt: generate "
                "without assistant_model and prompt_lookup_num_tokens"
            )
        kwargs = {**self._signature.bind_partial(*args).arguments, **kwargs}
        inputs = kwargs.get("input_ids")
        inputs = kwargs.get("inputs_embeds") if inputs is None else inputs
        if inputs is None:
            return None
        keep, columns = kwargs.get("logits_to_keep"), inputs.shape[1]
        drafted = min(keep, columns) - 1 if isinstance(keep, int) and keep > 1 else 0
        self._thread.prompt, cache.drafted = None, 0
        cache.allow_rollback(drafted)
        if drafted and (columns - drafted > 1 or not cache.get_seq_length()):
            self._thread.prompt = model(**_part(kwargs, 0, columns - drafted, columns, 1))
            kwargs = _part(kwargs, columns - drafted, columns, columns, drafted)
        cache.drafted = drafted
        return (), kwargs

    def _after_forward(self, _model: PreTrainedModel, _args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Put the prompt's logits and hidden states before those of the drafted tokens."""
        cache = kwargs.get("past_key_values")
        if not self._hooks.owns(cache) or not cache.drafts:
            return
        prompt, self._thread.prompt, cache.drafted = self._thread.prompt, None, None
        if prompt is not None:
            output.logits = torch.cat([prompt.logits, output.logits], dim=1)
            if output.hidden_states is not None:
                pairs = zip(prompt.hidden_states, output.hidden_states, strict=True)
                output.hidden_states = tuple(torch.cat(pair, dim=1) for pair in pairs)


class _Thread(threading.local):
    """prompt: what a thread's pass over a prompt gave, while that over its drafted tokens runs."""

    prompt: Any = None


def _part(kwargs: dict[str, Any], start: int, stop: int, columns: int, keep: int) -> dict[str, Any]:
    """The arguments of a pass over the columns [start, stop) of a pass of `columns` columns, which gives the logits of
    the last `keep`. Other tensors, those of images, are for the first part."""
    part = {name: x for name, x in kwargs.items() if start == 0 or not isinstance(x, Tensor)}
    for name, dim in _BY_COLUMN.items():
        if kwargs.get(name) is not None:
            part[name] = kwargs[name].narrow(dim, start, stop - start)
    if kwargs.get("attention_mask") is not None:
        mask = kwargs["attention_mask"]
        part["attention_mask"] = mask[:, : mask.shape[1] - (columns - stop)]
    return part | {"logits_to_keep": keep}

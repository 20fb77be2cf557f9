"""Passes of assisted generation: tokens of the text, then drafted ones, of which `generate` takes some back.

They give what plain decoding gives. Drafted tokens see what they would see decoded one by one, whatever `prefill` says,
and what they pack can be unpacked: the cache's rollback grows to their number. The first pass of `generate` has the
prompt and drafted tokens: it is run as two, since exact prefill is for the prompt, to which alone methods are fit. On a
cache that holds tokens of the text, that pass has them once more: they are left out.

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
from kvq_cli.attention.forward_arguments import BY_COLUMN, asked
from kvq_cli.cache_argument import passed_cache
from kvq_cli.errors import UsageError
from kvq_cli.layer_kinds import recurrent_layer
from kvq_cli.models import text_config


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
        after = self._model.register_forward_hook(self._after_forward, with_kwargs=True, always_call=True)
        undo.callback(after.remove)

    def _before_forward(
        self, model: PreTrainedModel, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]] | None:
        """Announce the drafted tokens of a pass. Where a prompt comes before them, compute that now, and leave the
        drafted tokens to the pass."""
        cache = passed_cache(kwargs)
        if not self._hooks.owns(cache) or not cache.drafts:
            return None
        self._check_model()
        kwargs = {**self._signature.bind_partial(*args).arguments, **kwargs}
        inputs = kwargs.get("input_ids")
        inputs = kwargs.get("inputs_embeds") if inputs is None else inputs
        if inputs is None:
            return None
        keep, columns = kwargs.get("logits_to_keep"), inputs.shape[1]
        drafted = min(keep, columns) - 1 if isinstance(keep, int) and keep > 1 else 0
        self._thread.prompt, cache.drafted = None, 0
        cache.allow_rollback(drafted)
        held = cache.get_seq_length()
        if held and columns - drafted > 1 and _is_whole(kwargs, columns):
            if held >= columns - drafted:
                raise UsageError(
                    f"the cache holds {held} tokens, the text has {columns - drafted}: pass all of them, and new ones"
                )
            kwargs = _part(kwargs, held, columns, columns, keep)
            columns -= held
        if drafted and (columns - drafted > 1 or not held):
            if not asked(model, kwargs, "return_dict"):
                raise UsageError("drafted tokens behind a prompt: their logits need return_dict=True")
            self._thread.prompt = model(**_part(kwargs, 0, columns - drafted, columns, 1))
            kwargs = _part(_of_tokens(kwargs), columns - drafted, columns, columns, drafted)
        if keep is not None:
            cache.record(drafted)
        cache.drafted = drafted
        return (), kwargs

    def _check_model(self) -> None:
        """Raise UsageError for a model over whose caches `generate` cannot decode drafted tokens."""
        name = type(self._model).__name__
        without = "generate without assistant_model and prompt_lookup_num_tokens"
        if "logits_to_keep" not in self._signature.parameters:
            raise UsageError(f"{name} takes no logits_to_keep, which tells drafted tokens from the prompt: {without}")
        if (layer := recurrent_layer(text_config(self._model.config))) is not None:
            raise UsageError(
                f"layer {layer} of {name} has a recurrent state, which cannot give drafted tokens back: {without}"
            )

    def _after_forward(self, _model: PreTrainedModel, _args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        """Put the prompt's logits and hidden states before those of the drafted tokens. output: None after an error."""
        cache = passed_cache(kwargs)
        if not self._hooks.owns(cache) or not cache.drafts:
            return
        prompt, self._thread.prompt, cache.drafted = self._thread.prompt, None, None
        if prompt is not None and output is not None:
            output.logits = torch.cat([prompt.logits, output.logits], dim=1)
            if output.hidden_states is not None:
                pairs = zip(prompt.hidden_states, output.hidden_states, strict=True)
                output.hidden_states = tuple(torch.cat(pair, dim=1) for pair in pairs)


class _Thread(threading.local):
    """prompt: what a thread's pass over a prompt gave, while that over its drafted tokens runs."""

    prompt: Any = None


def _is_whole(kwargs: dict[str, Any], columns: int) -> bool:
    """Return whether a pass has the text from its first token on, as its mask says, or without one its positions."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if isinstance(mask, Tensor):
        return mask.shape[1] == columns
    return positions is not None and not bool(positions[..., 0].any())


def _of_tokens(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Leave out tensors of images and the like, which are for the pass over the prompt."""
    names = {*BY_COLUMN, "attention_mask"}
    return {name: x for name, x in kwargs.items() if name in names or not isinstance(x, Tensor)}


def _part(kwargs: dict[str, Any], start: int, stop: int, columns: int, keep: Any) -> dict[str, Any]:
    """The arguments of a pass over the columns [start, stop) of a pass of `columns` columns, which gives the logits of
    the last `keep`."""
    part = dict(kwargs)
    for name, dim in BY_COLUMN.items():
        if kwargs.get(name) is not None:
            part[name] = kwargs[name].narrow(dim, start, stop - start)
    if kwargs.get("attention_mask") is not None:
        mask = kwargs["attention_mask"]
        part["attention_mask"] = mask[:, : mask.shape[1] - (columns - stop)]
    return part | {"logits_to_keep": keep}

"""Greedy answers to a batch of prompts through a compressed cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from kvq_cli.attention.attach import Attached
    from kvq_cli.cache.report import CacheReport
    from kvq_cli.models import LoadedModel


@dataclass(frozen=True)
class Answer:
    """text: without special tokens and without what a stop string cuts off; tokens: how many were generated."""

    text: str
    tokens: int


@torch.inference_mode()
def answer(
    loaded: LoadedModel,
    attached: Attached,
    prompts: Sequence[list[int]],
    budget: int,
    stop_strings: Sequence[str] = (),
) -> tuple[list[Answer], CacheReport]:
    """Continue each prompt greedily by at most `budget` tokens, up to the model's own stop tokens or a stop string.

    prompts: token ids, of any lengths (they are padded on the left). Returns the answers and the report of their cache.
    """
    from transformers import GenerationConfig, StoppingCriteriaList

    model, tokenizer = loaded.model, loaded.tokenizer
    stops = _stop_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops or [0])[0]
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    cache = attached.new_cache(longest + budget)
    config = GenerationConfig(max_new_tokens=budget, do_sample=False, pad_token_id=pad, eos_token_id=stops or None)
    criteria = StoppingCriteriaList([partial(_stopped, tokenizer, stop_strings, longest)] if stop_strings else [])
    out = model.generate(
        ids, attention_mask=mask, past_key_values=cache, generation_config=config, stopping_criteria=criteria
    )
    answers = [_answer(tokenizer, row, stops, stop_strings) for row in out[:, longest:].tolist()]
    return answers, attached.report(cache)


def _stopped(tokenizer, stop_strings: Sequence[str], start: int, ids: Tensor, _scores: object, **_: object) -> Tensor:
    """Whether the end of each row `[rows]`, from column `start` on, holds a stop string."""
    # A token is one byte at least; some more, because one may begin before the stop string and end in it.
    latest = max(len(one.encode()) for one in stop_strings) + 8
    texts = tokenizer.batch_decode(ids[:, start:][:, -latest:], skip_special_tokens=True)
    return torch.tensor([any(one in text for one in stop_strings) for text in texts], device=ids.device)


def _answer(tokenizer, row: list[int], stops: list[int], stop_strings: Sequence[str]) -> Answer:
    tokens = next((place + 1 for place, token in enumerate(row) if token in stops), len(row))
    decoded = partial(tokenizer.decode, skip_special_tokens=True)
    text = whole = decoded(row[:tokens])
    for one in stop_strings:
        text = text.split(one, 1)[0]
    if text != whole:  # what follows the stop string is padding
        tokens = next(n for n in range(1, tokens + 1) if any(one in decoded(row[:n]) for one in stop_strings))
    return Answer(text, tokens)


def _stop_tokens(model, tokenizer) -> list[int]:
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = tokenizer.eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)

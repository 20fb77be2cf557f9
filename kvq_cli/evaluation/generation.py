"""Greedy answers to a batch of prompts through a compressed cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvq_cli.attention.attach import Attached
    from kvq_cli.cache.report import CacheReport
    from kvq_cli.models import LoadedModel


@dataclass(frozen=True)
class Answer:
    """text: without special tokens; tokens: how many were generated, the stop token included."""

    text: str
    tokens: int


@torch.inference_mode()
def answer(
    loaded: LoadedModel, attached: Attached, prompts: list[list[int]], budget: int
) -> tuple[list[Answer], CacheReport]:
    """Continue each prompt greedily by at most `budget` tokens, up to the model's own stop tokens.

    prompts: token ids, of any lengths (they are padded on the left). Returns the answers and the report of their cache.
    """
    from transformers import GenerationConfig

    model, tokenizer = loaded.model, loaded.tokenizer
    stops = _stop_tokens(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops or [0])[0]
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    cache = attached.new_cache(longest + budget)
    config = GenerationConfig(max_new_tokens=budget, do_sample=False, pad_token_id=pad, eos_token_id=stops or None)
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, generation_config=config)
    answers = [_answer(tokenizer, row, stops) for row in out[:, longest:].tolist()]
    return answers, attached.report(cache)


def _answer(tokenizer, row: list[int], stops: list[int]) -> Answer:
    tokens = next((place + 1 for place, token in enumerate(row) if token in stops), len(row))
    return Answer(tokenizer.decode(row[:tokens], skip_special_tokens=True), tokens)


def _stop_tokens(model, tokenizer) -> list[int]:
    found = getattr(model.generation_config, "eos_token_id", None)
    if found is None:
        found = tokenizer.eos_token_id
    return [] if found is None else [found] if isinstance(found, int) else list(found)

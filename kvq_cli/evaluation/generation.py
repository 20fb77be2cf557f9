"""Greedy generation for a batch of prompts with a compressed cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvq_cli.attention.attach import Attached
    from kvq_cli.cache.report import CacheReport
    from kvq_cli.models import LoadedModel


@dataclass(frozen=True)
class GreedyAnswer:
    """text: without special tokens, cut at the first stop string; tokens: number of generated tokens."""

    text: str
    tokens: int


@torch.inference_mode()
def generate_answers(
    loaded: LoadedModel,
    attached: Attached,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    stop_strings: Sequence[str] = (),
) -> tuple[list[GreedyAnswer], CacheReport]:
    """Continue each prompt greedily until a stop token, a stop string or `max_new_tokens`.

    Each token is the most probable one: penalties and other options of the model's generation config do not apply.
    prompts: token ids of any lengths; they are padded on the left. Returns the answers and the cache's report.
    """
    from transformers import GenerationConfig, StoppingCriteriaList

    model, tokenizer = loaded.model, loaded.tokenizer
    stops = stop_tokens(loaded)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops or [0])[0]
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    cache = attached.new_cache(longest + max_new_tokens)
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, pad_token_id=pad, eos_token_id=stops or None
    )
    criteria = StoppingCriteriaList(
        [partial(_has_stop_string, tokenizer, stop_strings, longest)] if stop_strings else []
    )
    with _no_generation_config(model):
        # `nn.Module.__getattr__` hides the method's type from mypy.
        out = model.generate(  # type: ignore[operator]
            ids, attention_mask=mask, past_key_values=cache, generation_config=config, stopping_criteria=criteria
        )
    answers = [_cut_answer(tokenizer, row, stops, stop_strings) for row in out[:, longest:].tolist()]
    return answers, attached.report(cache)


def stop_tokens(loaded: LoadedModel) -> list[int]:
    """Token ids that end an answer: those of the model's generation config, and the tokenizer's EOS, as in lm-eval."""
    own = getattr(loaded.model.generation_config, "eos_token_id", None)
    both = [*(own if isinstance(own, list) else [own]), loaded.tokenizer.eos_token_id]
    return list(dict.fromkeys(token for token in both if token is not None))


def prompt_key(loaded: LoadedModel, text: str, chat: bool) -> dict[str, Any]:
    """Entries of a resume key: what a task's options do not say about its prompts and the ends of its answers.

    text: of the first prompt, without the chat template, since some templates write today's date; chat: whether the
    template is applied.
    """
    tokenizer = loaded.tokenizer
    prompt = [tokenizer(text, verbose=False).input_ids, tokenizer.chat_template if chat else None]
    digest = sha256(json.dumps(prompt, default=str).encode()).hexdigest()
    return {"first_prompt_sha256": digest, "stop_tokens": stop_tokens(loaded)}


def _has_stop_string(
    tokenizer: Any, stop_strings: Sequence[str], start: int, ids: Tensor, _scores: object, **_: object
) -> Tensor:
    """Whether the newest tokens of each row, from column `start` on, contain a stop string: `[rows]` booleans."""
    # A token has at least one byte; 8 more tokens, because one may begin before the stop string and end in it.
    window = max(len(stop.encode()) for stop in stop_strings) + 8
    texts = tokenizer.batch_decode(ids[:, start:][:, -window:], skip_special_tokens=True)
    return torch.tensor([any(stop in text for stop in stop_strings) for text in texts], device=ids.device)


def _cut_answer(tokenizer: Any, row: list[int], stops: list[int], stop_strings: Sequence[str]) -> GreedyAnswer:
    """Decode the new tokens of a row up to its first stop token or stop string."""
    tokens = next((place + 1 for place, token in enumerate(row) if token in stops), len(row))
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    text = whole = decode(row[:tokens])
    for stop in stop_strings:
        text = text.split(stop, 1)[0]
    if text != whole:  # tokens behind the stop string are padding
        tokens = next(n for n in range(1, tokens + 1) if any(stop in decode(row[:n]) for stop in stop_strings))
    return GreedyAnswer(text, tokens)


@contextmanager
def _no_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Without the model's generation config, from which transformers takes every option that is not given."""
    from transformers import GenerationConfig

    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own

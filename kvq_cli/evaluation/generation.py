"""Greedy generation for a batch of prompts with a compressed cache."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, reduce
from hashlib import sha256
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kvq_cli.attention.attach import Attached
    from kvq_cli.cache.cache import CompressedCache
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

    Each token is the most probable one: penalties and other options of the model's generation config do not apply. On a
    CPU, where each row of a batch costs time, the rows of finished answers leave it whenever they are half of it.
    prompts: token ids of any lengths; they are padded on the left. Returns the answers and the cache's report, which
    counts each row as it was when it left.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    stops = stop_tokens(loaded)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops or [0])[0]
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    cache = attached.new_cache(longest + max_new_tokens)
    answers: dict[int, GreedyAnswer] = {}
    left: list[CacheReport] = []
    rows = torch.arange(len(prompts))
    while True:
        ended = _Ended(tokenizer, stops, stop_strings, longest, share=0.5 if model.device.type == "cpu" else 1.0)
        ids = _generate(model, ids, mask, cache, longest + max_new_tokens, pad, ended)
        stay = ~ended.rows if ids.shape[1] < longest + max_new_tokens else torch.zeros(len(rows), dtype=torch.bool)
        for row in (~stay).nonzero().flatten().tolist():
            answers[int(rows[row])] = _cut_answer(tokenizer, ids[row, longest:].tolist(), stops, stop_strings)
        if not stay.any():
            return [answers[index] for index in range(len(prompts))], reduce(add, left, attached.report(cache))
        leaving = cache.clone()
        leaving.batch_select_indices(~stay)
        left.append(attached.report(leaving))
        cache.batch_select_indices(stay)
        ids, rows, mask = ids[stay.to(ids.device)], rows[stay], mask[stay.to(mask.device)]
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)


def _generate(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: CompressedCache, length: int, pad: int, ended: _Ended
) -> Tensor:
    """`ids` `[rows, tokens]` continued up to `length` tokens, or until enough rows have ended."""
    from transformers import GenerationConfig, StoppingCriteriaList

    config = GenerationConfig(
        max_new_tokens=length - ids.shape[1], do_sample=False, pad_token_id=pad, eos_token_id=ended.stops or None
    )
    with _no_generation_config(model):
        # `nn.Module.__getattr__` hides the method's type from mypy.
        return model.generate(  # type: ignore[operator]
            ids,
            attention_mask=mask,
            past_key_values=cache,
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([ended]),
        )


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


class _Ended:
    """transformers' criterion: the rows `[rows]` whose answers, from column `start` on, have ended; all of them, once
    `share` of the rows have."""

    def __init__(self, tokenizer: Any, stops: list[int], stop_strings: Sequence[str], start: int, share: float) -> None:
        self.rows = torch.zeros(0, dtype=torch.bool)
        self.stops, self._share = stops, share
        self._tokenizer, self._stop_strings, self._start = tokenizer, stop_strings, start

    def __call__(self, ids: Tensor, _scores: object, **_: object) -> Tensor:
        now = torch.isin(ids[:, -1].cpu(), torch.tensor(self.stops, dtype=ids.dtype))
        if self._stop_strings:
            now |= self._has_stop_string(ids)
        self.rows = now | self.rows if len(self.rows) else now
        enough = int(self.rows.sum()) >= self._share * len(ids)
        return (torch.ones_like(now) if enough else self.rows).to(ids.device)

    def _has_stop_string(self, ids: Tensor) -> Tensor:
        """Whether the newest tokens of each row contain a stop string."""
        # A token has at least one byte; 8 more tokens, because one may begin before the stop string and end in it.
        window = max(len(stop.encode()) for stop in self._stop_strings) + 8
        texts = self._tokenizer.batch_decode(ids[:, self._start :][:, -window:], skip_special_tokens=True)
        return torch.tensor([any(stop in text for stop in self._stop_strings) for text in texts])


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

"""Generate answers to a batch of prompts with a compressed cache, greedily or sampled."""

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

from kvq_cli.cache_argument import cache_argument
from kvq_cli.errors import KvqError
from kvq_cli.evaluation.chat_template import encode_prompt
from kvq_cli.models import check_token_ids, text_config, vocabulary

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

    from kvq_cli.attention.attach import Attached
    from kvq_cli.cache.cache import CompressedCache
    from kvq_cli.cache.report import CacheReport
    from kvq_cli.evaluation.sampling import RowSampler
    from kvq_cli.models import LoadedModel

#: Settings of a generation config that apply to sampling, with the values that change nothing.
SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Answer:
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
    sampler: RowSampler | None = None,
) -> tuple[list[Answer], CacheReport]:
    """Continue each prompt until a stop token, a stop string or `max_new_tokens`.

    Each token is the most probable one, or that of `sampler`, which has a row per prompt: penalties and other options
    of the model's generation config do not apply. On a CPU, where each row of a batch costs time, the row of a finished
    answer leaves it at once.
    prompts: token ids of any lengths; they are padded on the left. Returns the answers and the cache's report, which
    counts each row as it was when it left.
    """
    model, tokenizer = loaded.model, loaded.tokenizer
    stops = stop_tokens(loaded, stop_strings)
    check_token_ids(model, prompts)
    pad = pad_token(loaded, stops)
    # Neighbouring rows of equal length are computed together.
    rows = torch.tensor(sorted(range(len(prompts)), key=lambda row: len(prompts[row])))
    batch = [prompts[row] for row in rows]
    if sampler is not None:
        sampler.reorder(rows.tolist())
    longest = len(batch[-1])
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in batch], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch], device=model.device)
    length = longest + max_new_tokens
    cache = attached.new_cache(length)
    answers: dict[int, Answer] = {}
    left: list[CacheReport] = []
    while True:
        ended = _Ended(tokenizer, stops, stop_strings, ids, longest, model.device.type == "cpu")
        ids = _generate(model, ids, mask, cache, length, pad, ended, sampler)
        stay = ~ended.rows.cpu() & (ids.shape[1] < length)
        for row in (~stay).nonzero().flatten().tolist():
            answers[int(rows[row])] = _cut_answer(tokenizer, ids[row, longest:].tolist(), stops, stop_strings)
        if not stay.any():
            attached.check_steps()
            return [answers[index] for index in range(len(prompts))], reduce(add, left, attached.report(cache))
        leaving = cache.clone()
        leaving.batch_select_indices(~stay)
        left.append(attached.report(leaving))
        cache.batch_select_indices(stay)
        if sampler is not None:
            sampler.reorder(stay.nonzero().flatten().tolist())
        ids, rows, mask = ids[stay.to(ids.device)], rows[stay], mask[stay.to(mask.device)]
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)


def _generate(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor,
    cache: CompressedCache,
    length: int,
    pad: int,
    ended: _Ended,
    sampler: RowSampler | None,
) -> Tensor:
    """`ids` `[rows, tokens]` continued up to `length` tokens, or until `ended` ends all rows."""
    from transformers import LogitsProcessorList, StoppingCriteriaList

    settings: dict[str, Any] = {"max_new_tokens": length - ids.shape[1], "do_sample": False, "pad_token_id": pad}
    settings["eos_token_id"] = ended.stops or None
    arguments: dict[str, Any] = {"stopping_criteria": StoppingCriteriaList([ended])}
    if sampler is not None:
        arguments["logits_processor"] = LogitsProcessorList([sampler])
    return continue_ids(model, ids, mask, cache, settings, **arguments)


def continue_ids(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, cache: Cache | None, settings: dict[str, Any], **arguments: Any
) -> Tensor:
    """`ids` `[rows, tokens]` continued by transformers' `generate` with these settings of a `GenerationConfig`; those
    of the model's files do not apply. cache: None for transformers' own, inside `attach` too. arguments: other ones of
    `generate`, such as a streamer."""
    from transformers import GenerationConfig

    config = GenerationConfig(**settings)
    with _no_generation_config(model):
        # The class's: that of an attached model takes a compressed cache where `cache` is None. mypy does not know it.
        return type(model).generate(  # type: ignore[attr-defined]
            model, ids, attention_mask=mask, generation_config=config, **cache_argument(cache), **arguments
        )


def sampling_defaults(model: PreTrainedModel) -> dict[str, float]:
    """Those settings of the model's generation config in `SAMPLING` that change which tokens are sampled, by name.
    KvqError for one that is no number."""
    found = {name: getattr(model.generation_config, name, None) for name in SAMPLING}
    for name, value in found.items():
        if value is not None and not isinstance(value, (int, float)):
            raise KvqError(f"the model's generation_config.json: {name} is {value!r}, not a number")
    return {name: value for name, value in found.items() if value is not None and value != SAMPLING[name]}


def pad_token(loaded: LoadedModel, stops: Sequence[int]) -> int:
    """The tokenizer's pad token, or a stop token where it has none that the model embeds."""
    pad = loaded.tokenizer.pad_token_id
    if pad is None or pad >= vocabulary(loaded.model):  # a pad token that was added to the tokenizer alone
        return (*stops, 0)[0]
    return pad


def stop_tokens(loaded: LoadedModel, stop_strings: Sequence[str] = ()) -> list[int]:
    """Token ids that end a text: EOS of the model's generation config, of the tokenizer and of the model's config, and
    stop strings that are special tokens (answers are decoded without these), as in lm-eval."""
    tokenizer, model = loaded.tokenizer, loaded.model
    special = set(tokenizer.all_special_tokens).intersection(stop_strings)
    ids: list[Any] = []
    for source in (model.generation_config, tokenizer, model.config, text_config(model.config)):
        own = getattr(source, "eos_token_id", None)
        ids += own if isinstance(own, list) else [own]
    ids += [tokenizer.convert_tokens_to_ids(stop) for stop in stop_strings if stop in special]
    return list(dict.fromkeys(token for token in ids if token is not None))


def prompt_key(loaded: LoadedModel, text: str, chat: bool, stop_strings: Sequence[str] = ()) -> dict[str, Any]:
    """Entries of a resume key: what a task's options do not say about its prompts and the ends of its answers.

    text: of the first prompt, without the chat template, since some templates write today's date; chat: whether the
    template is applied.
    """
    tokenizer = loaded.tokenizer
    prompt = [encode_prompt(tokenizer, text), tokenizer.chat_template if chat else None]
    digest = sha256(json.dumps(prompt, default=str).encode()).hexdigest()
    return {"first_prompt_sha256": digest, "stop_tokens": stop_tokens(loaded, stop_strings)}


class _Ended:
    """End the rows of transformers' `generate` whose answers, which begin at column `start`, contain a stop; with
    `together`, the first ends all rows. Nothing but stop strings waits for the device.

    rows: whether each row has ended by itself, booleans `[rows]`.
    """

    def __init__(
        self, tokenizer: Any, stops: list[int], stop_strings: Sequence[str], ids: Tensor, start: int, together: bool
    ) -> None:
        self.rows = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        self.stops, self._tokens = stops, torch.tensor(stops, dtype=ids.dtype, device=ids.device)
        self._tokenizer, self._stop_strings = tokenizer, stop_strings
        self._start, self._together = start, together

    def __call__(self, ids: Tensor, _scores: object, **_: object) -> Tensor:
        self.rows |= torch.isin(ids[:, -1], self._tokens)
        if self._stop_strings:
            self.rows |= self._has_stop_string(ids)
        return self.rows | self.rows.any() if self._together else self.rows

    def _has_stop_string(self, ids: Tensor) -> Tensor:
        """Whether the newest tokens of each row contain a stop string."""
        # A token has at least one byte; 8 more tokens, because one may begin before the stop string and end in it.
        window = max(len(stop.encode()) for stop in self._stop_strings) + 8
        texts = self._tokenizer.batch_decode(ids[:, self._start :][:, -window:], skip_special_tokens=True)
        return torch.tensor([any(stop in text for stop in self._stop_strings) for text in texts], device=ids.device)


def _cut_answer(tokenizer: Any, row: list[int], stops: list[int], stop_strings: Sequence[str]) -> Answer:
    """Decode the new tokens of a row up to its first stop token or stop string."""
    tokens = next((place + 1 for place, token in enumerate(row) if token in stops), len(row))
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    text = whole = decode(row[:tokens])
    for stop in stop_strings:
        text = text.split(stop, 1)[0]
    if text != whole:  # tokens behind the stop string are padding
        tokens = next(n for n in range(1, tokens + 1) if any(stop in decode(row[:n]) for stop in stop_strings))
    return Answer(text, tokens)


@contextmanager
def _no_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Without the model's generation config, from which transformers takes every option that is not given."""
    from transformers import GenerationConfig

    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own

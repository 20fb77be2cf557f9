"""lm-eval's view of a model with a compression method under it.

Answers are generated through a compressed cache. A log-likelihood is one forward pass over context and continuation,
in which every token attends to what a decode token by token would see (`prefill="compressed"`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from kvq_cli.errors import UsageError
from kvq_cli.evaluation.base import Record, cache_record
from kvq_cli.evaluation.divergence import CHUNK_NUMBERS
from kvq_cli.evaluation.generation import answer

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from kvq_cli.attention.attach import Attached
    from kvq_cli.cache.report import CacheReport
    from kvq_cli.models import LoadedModel

TRUNCATIONS = ("left", "middle")
NEW_TOKENS = 256
"""Longest answer where a task does not say; lm-eval's own default."""
_BUDGETS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_NO_SAMPLING = {"do_sample", "temperature", "top_p", "top_k", "min_p", "until", *_BUDGETS}


class AttachedLM(TemplateLM):
    """A loaded model with an attached method, as an `lm_eval.api.model.LM`.

    max_length: the longest prompt with its answer; what is longer loses tokens at the `truncation` side ("left", as
    lm-eval does, or "middle", as LongBench does). new_tokens: overrides the length of answers that a task asks for.
    used: what the caches took, one `(record, rows)` for each batch since it was last emptied.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        attached: Attached,
        *,
        batch_size: int = 1,
        max_length: int | None = None,
        truncation: str = "left",
        new_tokens: int | None = None,
    ) -> None:
        super().__init__()
        if truncation not in TRUNCATIONS:
            raise UsageError(f"unknown truncation {truncation!r}; valid: {', '.join(TRUNCATIONS)}")
        if max_length is not None and max_length > loaded.context:
            raise UsageError(f"--max-length {max_length}: {loaded.name} was made for {loaded.context} tokens at most")
        self.loaded, self.attached, self.tokenizer = loaded, attached, loaded.tokenizer
        self.batch_size, self.max_length = batch_size, max_length or loaded.context
        self.truncation, self.new_tokens = truncation, new_tokens
        self._device = loaded.model.device
        self.used: list[tuple[Record, int]] = []

    # -- tokens ------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What stands before the first token of a text without context."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else first

    @property
    def tokenizer_name(self) -> str:
        return self.loaded.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        first = self.tokenizer.bos_token
        if add_special_tokens is None:  # a chat template writes the first token itself
            add_special_tokens = not (first and string.startswith(first))
        return self.tokenizer(string, add_special_tokens=add_special_tokens, verbose=False).input_ids

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return chat_prompt(self.tokenizer, chat_history, add_generation_prompt)

    def prompt_tokens(self, request: Instance) -> tuple[int, int]:
        """Tokens of a request's longest input, and how many of them do not fit the model."""
        arguments = request.args
        if request.request_type == "loglikelihood_rolling":
            return len(self.tok_encode(arguments[0])), 0  # read in windows
        if request.request_type == "generate_until":
            count = len(self.tok_encode(arguments[0]))
            return count, max(0, count - self._room(arguments[1]))
        count = len(self.tok_encode("".join(arguments)))
        return count, max(0, count - self.max_length - 1)

    # -- log-likelihoods ---------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """`(sum of ln p(continuation), whether greedy decoding would give it)` of (key, context, continuation)."""
        check_prefill("log-likelihoods", self.attached.prefill)
        # Continuations of one token, such as the letters of choices, share their input.
        sharing: dict[tuple[int, ...], list[int]] = {}
        for index, (_key, context, continuation) in enumerate(requests):
            sharing.setdefault(tuple((context + continuation)[-self.max_length - 1 : -1]), []).append(index)
        found: dict[int, tuple[float, bool]] = {}
        for inputs in _batches(sorted(sharing, key=len, reverse=True), self.batch_size):
            longest = max(len(requests[index][2]) for tokens in inputs for index in sharing[tokens])
            for tokens, logits in zip(inputs, self._logits(inputs, longest), strict=True):
                for index in sharing[tokens]:
                    found[index] = _score(logits, requests[index][2])
                    if requests[index][0] is not None:  # a window of a longer text is no request of its own
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], found[index])
        return [found[index] for index in range(len(requests))]

    @torch.inference_mode()
    def _logits(self, inputs: Sequence[tuple[int, ...]], last: int) -> Tensor:
        """Logits of the next token `[rows, last, vocabulary]` at the last positions of each input."""
        model, longest = self.loaded.model, max(map(len, inputs))
        pads = [longest - len(tokens) for tokens in inputs]
        ids = torch.tensor([[0] * pad + [*tokens] for pad, tokens in zip(pads, inputs, strict=True)])
        mask = torch.tensor([[0] * pad + [1] * (longest - pad) for pad in pads])
        cache = self.attached.new_cache(longest)
        logits = model(
            ids.to(model.device),
            attention_mask=mask.to(model.device),
            position_ids=(mask.cumsum(1) - 1).clamp(min=0).to(model.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=last,
        ).logits
        self._count(self.attached.report(cache), len(inputs))
        return logits

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """ln p of whole texts, read in windows of the model's length that do not overlap."""
        found = []
        for (text,) in (request.args for request in requests):
            windows = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length, 1)
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(log_p for log_p, _ in self._loglikelihood_tokens(pairs)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
        return found

    # -- generation --------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy answers, up to the task's stop strings, which are cut off."""
        prompts = [self._prompt(*request.args) for request in requests]
        alike: dict[tuple, list[int]] = {}
        for index, request in enumerate(requests):
            options = request.args[1]
            alike.setdefault((self._budget(options), *_stop_strings(options)), []).append(index)
        found: dict[int, str] = {}
        for (longest, *stops), indices in alike.items():
            indices.sort(key=lambda index: -len(prompts[index]))
            for batch in _batches(indices, self.batch_size):
                given, report = answer(self.loaded, self.attached, [prompts[i] for i in batch], longest, stops)
                self._count(report, len(batch))
                for index, one in zip(batch, given, strict=True):
                    found[index] = one.text
                    self.cache_hook.add_partial("generate_until", requests[index].args, one.text)
        return [found[index] for index in range(len(requests))]

    def _prompt(self, text: str, options: Mapping[str, Any]) -> list[int]:
        check_greedy("the task", options)
        tokens, longest = self.tok_encode(text), self._room(options)
        if len(tokens) <= longest:
            return tokens
        head = longest // 2 if self.truncation == "middle" else 0
        return tokens[:head] + tokens[head - longest :]

    def _budget(self, options: Mapping[str, Any]) -> int:
        return budget(options, self.new_tokens)

    def _room(self, options: Mapping[str, Any]) -> int:
        return room(options, self.max_length, self.new_tokens)

    def _count(self, report: CacheReport, rows: int) -> None:
        self.used.append((cache_record(report, rows), rows))


def budget(options: Mapping[str, Any], new_tokens: int | None = None) -> int:
    """Tokens that an answer may have: `new_tokens`, or what a task's generation options say."""
    return new_tokens or int(next((options[name] for name in _BUDGETS if options.get(name) is not None), NEW_TOKENS))


def room(options: Mapping[str, Any], max_length: int, new_tokens: int | None = None) -> int:
    """Tokens that are left for the prompt; UsageError where there are none."""
    left = max_length - budget(options, new_tokens)
    if left < 1:
        raise UsageError(
            f"answers of {max_length - left} tokens leave no room for a prompt in {max_length} tokens: pass a smaller "
            "--max-new-tokens or a larger --max-length"
        )
    return left


def chat_prompt(tokenizer, turns: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """A conversation in the tokenizer's chat template; without a new turn, its last turn is left open."""
    return tokenizer.apply_chat_template(
        turns,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=not add_generation_prompt,
    )


def check_greedy(task: str, options: Mapping[str, Any]) -> None:
    """UsageError for a task whose answers are drawn at random: what two methods differ in would be chance."""
    if options.get("do_sample") or (options.get("do_sample") is None and float(options.get("temperature") or 0) > 0):
        raise UsageError(f"{task} draws its answers at random (do_sample): kvq compares greedy answers only")
    for name in options:
        if name not in _NO_SAMPLING:
            raise UsageError(f"{task} generates with {name}, which kvq does not do")


def check_prefill(what: str, prefill: str) -> None:
    """UsageError where one forward pass would attend to uncompressed keys and values."""
    if prefill != "compressed":
        raise UsageError(f"{what} with prefill {prefill} measure nothing: the one forward pass would not be compressed")


def mean_record(used: Iterable[tuple[Record, int]]) -> Record:
    """One record of several batches' caches: means over all sequences."""
    used = list(used)
    rows = sum(count for _, count in used)
    return {key: sum(record[key] * count for record, count in used) / rows for key in used[0][0]}


def _score(logits: Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
    """logits: `[last, vocabulary]`, its last rows those of the continuation."""
    wanted = torch.tensor(continuation, device=logits.device)[:, None]
    rows = max(1, CHUNK_NUMBERS // logits.shape[-1])
    total, greedy = 0.0, True
    for some, tokens in zip(logits[len(logits) - len(wanted) :].split(rows), wanted.split(rows), strict=True):
        log_p = some.float().log_softmax(-1)
        total += float(log_p.gather(1, tokens).double().sum())
        greedy = greedy and bool((log_p.argmax(-1, keepdim=True) == tokens).all())
    return total, greedy


def _stop_strings(options: Mapping[str, Any]) -> list[str]:
    until = options.get("until") or []
    return [one for one in ([until] if isinstance(until, str) else until) if one]


def _batches(items: Iterable, size: int) -> Iterator[list]:
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch

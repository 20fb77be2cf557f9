"""`lm_eval.api.model.LM` over a model with an attached compression method.

Answers are generated with a compressed cache. For a log-likelihood the context is the prompt, and the continuation is
scored as decoded behind it (`scoring`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor

from kvq_cli.errors import KvqError, UsageError
from kvq_cli.evaluation.base import cache_record, mean_packed_bits
from kvq_cli.evaluation.chat_template import chat_prompt, encode_prompt
from kvq_cli.evaluation.divergence import rows_per_chunk
from kvq_cli.evaluation.generation import generate_answers
from kvq_cli.evaluation.sampling import SAMPLING_OPTIONS, Sampling
from kvq_cli.evaluation.scoring import continuation_logits, prompt_and_decoded

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from kvq_cli.attention.attach import Attached
    from kvq_cli.cache.report import CacheReport
    from kvq_cli.models import LoadedModel

T = TypeVar("T")
Row = tuple[Sequence[int], Sequence[int]]

TRUNCATIONS = ("left", "middle")
DEFAULT_NEW_TOKENS = 256
"""Maximum answer length of tasks that define none; lm-eval's own default."""
_MAX_NEW_TOKENS_OPTIONS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_OPTIONS = {*SAMPLING_OPTIONS, "until", *_MAX_NEW_TOKENS_OPTIONS}


class AttachedLM(TemplateLM):
    """A loaded model with an attached method, as an `lm_eval.api.model.LM`.

    max_length:    maximum tokens of prompt and answer (default: the model's context length).
    truncation:    where longer prompts lose tokens, "left" (as in lm-eval) or "middle" (as in LongBench).
    new_tokens:    overrides the tasks' maximum answer length.
    seed:          of answers of tasks that sample them.
    cache_records: `(cache record, rows)` of each batch since the list was last cleared.
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
        seed: int = 0,
    ) -> None:
        super().__init__()
        if truncation not in TRUNCATIONS:
            raise UsageError(f"unknown truncation {truncation!r}; valid: {', '.join(TRUNCATIONS)}")
        if max_length is not None and max_length > loaded.context:
            raise UsageError(
                f"--max-length {max_length}: the context length of {loaded.name} is {loaded.context} tokens"
            )
        self.loaded, self.attached, self.tokenizer = loaded, attached, loaded.tokenizer
        self.batch_size, self.max_length = batch_size, max_length or loaded.context
        self.truncation, self.new_tokens, self.seed = truncation, new_tokens, seed
        self._device = loaded.model.device
        self.cache_records: list[tuple[dict[str, float], int]] = []

    # -- tokens ------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Token that precedes a text without context: BOS, or EOS for tokenizers without BOS."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        return self.loaded.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:  # a chat template writes BOS itself
            add_special_tokens = not (bos and string.startswith(bos))
        return encode_prompt(self.tokenizer, string, add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return chat_prompt(self.tokenizer, chat_history, add_generation_prompt)

    def prompt_tokens(self, request: Instance) -> tuple[int, int]:
        """`(tokens of a request's input, tokens of it that are truncated)`."""
        arguments = request.args
        if request.request_type == "loglikelihood_rolling":
            return len(self.tok_encode(arguments[0])), 0  # scored in windows
        if request.request_type == "generate_until":
            count = len(self.tok_encode(arguments[0]))
            return count, max(0, count - self._max_prompt_tokens(arguments[1]))
        count = len(self.tok_encode("".join(arguments)))
        return count, max(0, count - self.max_length - 1)

    # -- log-likelihoods ---------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """`(ln p(continuation | context), whether it is the greedy continuation)` of `(key, context, continuation)`."""
        # Continuations that differ in their last token alone, such as the letters of a multiple choice, share a pass.
        sharing: dict[tuple[tuple[int, ...], tuple[int, ...]], list[tuple[int, list[int]]]] = {}
        for index, (_key, context, continuation) in enumerate(requests):
            scored = continuation[-self.max_length :]
            kept = context[max(0, len(context) + len(scored) - self.max_length - 1) :]
            sharing.setdefault((tuple(kept), tuple(scored[:-1])), []).append((index, scored))
        scores: dict[int, tuple[float, bool]] = {}
        rows = [(context, sharers[0][1]) for (context, _), sharers in sharing.items()]
        rows.sort(key=lambda row: len(row[0]) + len(row[1]), reverse=True)
        for batch in _fitting_batches(rows, self.batch_size, self.loaded.context):
            members = [sharing[tuple(context), tuple(scored[:-1])] for context, scored in batch]
            logits_of_rows, report = continuation_logits(self.attached, *zip(*batch, strict=True))
            self._keep_record(report, len(batch))
            for sharers, logits in zip(members, logits_of_rows, strict=True):
                for index, scored in sharers:
                    scores[index] = _score(logits, scored)
                    if requests[index][0] is not None:  # None: a window of a longer text, not a request
                        self.cache_hook.add_partial("loglikelihood", requests[index][0], scores[index])
        return [scores[index] for index in range(len(requests))]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """ln p of whole texts, scored in non-overlapping windows of `max_length` tokens. KvqError for an empty text."""
        totals: list[float] = []
        for (text,) in (request.args for request in requests):
            tokens = self.tok_encode(text)
            if not tokens:
                raise KvqError(f"the text {text!r} has no tokens to score: remove it from the task's documents")
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            pairs = [(None, *make_disjoint_window(window)) for window in windows]
            totals.append(sum(log_p for log_p, _ in self._loglikelihood_tokens(pairs)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), totals[-1])
        return totals

    # -- generation --------------------------------------------------------------------------------------------

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Answers, cut at the task's stop strings; sampled where the task's options say so, repeated requests anew."""
        prompts, names = [self._prompt(*request.args) for request in requests], _answer_names(requests)
        same_options: dict[tuple[int, tuple[str, ...], Sampling | None], list[int]] = {}
        for index, request in enumerate(requests):
            options = request.args[1]
            key = max_new_tokens(options, self.new_tokens), tuple(stop_strings(options)), Sampling.of(options)
            same_options.setdefault(key, []).append(index)
        texts: dict[int, str] = {}
        for (new_tokens, stops, sampling), indices in same_options.items():
            indices.sort(key=lambda index: -len(prompts[index]))
            for batch in _batches(indices, self.batch_size):
                ids = [prompts[index] for index in batch]
                keys = [f"{self.seed} {names[index]}" for index in batch]
                sampler = None if sampling is None else sampling.sampler(keys)
                answers, report = generate_answers(self.loaded, self.attached, ids, new_tokens, stops, sampler)
                self._keep_record(report, len(batch))
                for index, answer in zip(batch, answers, strict=True):
                    texts[index] = answer.text
                    self.cache_hook.add_partial("generate_until", requests[index].args, answer.text)
        return [texts[index] for index in range(len(requests))]

    def _prompt(self, text: str, options: Mapping[str, Any]) -> list[int]:
        check_generation("the task", options)
        tokens, longest = self.tok_encode(text), self._max_prompt_tokens(options)
        if len(tokens) <= longest:
            return tokens
        head = longest // 2 if self.truncation == "middle" else 0
        return tokens[:head] + tokens[head - longest :]

    def _max_prompt_tokens(self, options: Mapping[str, Any]) -> int:
        return max_prompt_tokens(options, self.max_length, self.new_tokens)

    def _keep_record(self, report: CacheReport, rows: int) -> None:
        self.cache_records.append((cache_record(report, rows), rows))


def max_new_tokens(options: Mapping[str, Any], override: int | None = None) -> int:
    """Maximum length of an answer in tokens: `override`, or the value in a task's generation options."""
    given = (options[name] for name in _MAX_NEW_TOKENS_OPTIONS if options.get(name) is not None)
    return override or int(next(given, DEFAULT_NEW_TOKENS))


def max_prompt_tokens(options: Mapping[str, Any], max_length: int, new_tokens: int | None = None) -> int:
    """Tokens left for the prompt in `max_length`; UsageError if there are none."""
    left = max_length - max_new_tokens(options, new_tokens)
    if left < 1:
        raise UsageError(
            f"answers of {max_length - left} tokens leave no room for a prompt in {max_length} tokens: pass a smaller "
            "--max-new-tokens or a larger --max-length"
        )
    return left


def check_generation(task: str, options: Mapping[str, Any]) -> None:
    """UsageError for an option of generation that changes answers in a way that kvq does not compute."""
    for name in options:
        if name not in _OPTIONS:
            raise UsageError(f"{task} generates with {name}, which kvq does not support")
    try:
        Sampling.of(options)
    except ValueError as error:
        raise UsageError(f"{task}: {error}") from None


def _answer_names(requests: Sequence[Instance]) -> list[str]:
    """Names of requests' answers, equal for all methods and batches: task, document, request, and which repeat it is.

    Not the prompt: some chat templates write today's date into it.
    """
    seen: Counter[str] = Counter()
    names = []
    for request in requests:
        name = f"{request.task_name} {request.doc_id} {request.idx}"
        names.append(f"{seen[name]} {name}")
        seen[name] += 1
    return names


def mean_cache_record(records: Sequence[tuple[dict[str, float], int]]) -> dict[str, float]:
    """Mean cache record over all sequences of several batches, given as `(record, rows)`."""
    rows = sum(count for _, count in records)
    means = {key: sum(record[key] * count for record, count in records) / rows for key in records[0][0]}
    return means | {"packed_bits": mean_packed_bits(records)}


def _score(logits: Tensor, continuation: Sequence[int]) -> tuple[float, bool]:
    """`(ln p(continuation), whether it is greedy)`; logits: `[last, vocabulary]`, ending with the continuation's."""
    targets = torch.tensor(continuation, device=logits.device)[:, None]
    rows = rows_per_chunk(logits)
    total, greedy = 0.0, True
    for chunk, tokens in zip(logits[len(logits) - len(targets) :].split(rows), targets.split(rows), strict=True):
        log_p = chunk.float().log_softmax(-1)
        total += float(log_p.gather(1, tokens).double().sum())
        greedy = greedy and bool((log_p.argmax(-1, keepdim=True) == tokens).all())
    return total, greedy


def stop_strings(options: Mapping[str, Any]) -> list[str]:
    """The stop strings of a task's generation options."""
    until = options.get("until") or []
    return [stop for stop in ([until] if isinstance(until, str) else until) if stop]


def _fitting_batches(rows: Iterable[Row], size: int, context: int) -> Iterator[list[Row]]:
    """Batches of at most `size` rows, with at most `context` tokens, the padding of `continuation_logits` included.

    rows: `(context, continuation)`.
    """
    batch: list[Row] = []
    padded = 0, 0
    for row in rows:
        prompt, decoded = map(len, prompt_and_decoded(*row))
        wider = max(padded[0], prompt), max(padded[1], decoded)
        if batch and (len(batch) == size or sum(wider) > context):
            yield batch
            batch, wider = [], (prompt, decoded)
        batch.append(row)
        padded = wider
    if batch:
        yield batch


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    remaining = iter(items)
    while batch := list(islice(remaining, size)):
        yield batch

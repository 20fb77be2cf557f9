"""Text generation with a compressed cache, shared by `kvq generate` and `kvq chat`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from kvq_cli.cli import options as opt
from kvq_cli.cli.cache_lines import cache_line, longer_text
from kvq_cli.cli.character_streamer import CharacterStreamer
from kvq_cli.cli.failures import escaped_answer
from kvq_cli.errors import KvqError, UsageError, reason

if TYPE_CHECKING:
    from kvq_cli.artifact import Artifact
    from kvq_cli.attention.attach import Attached
    from kvq_cli.cache.cache import CompressedCache
    from kvq_cli.models import LoadedModel


#: First tokens of a text that are kept where the oldest are dropped, as attention sinks (StreamingLLM).
MIN_SINKS = 4


@dataclass(frozen=True)
class Decoding:
    """Decoding parameters, named as in transformers' `generate`. Temperature 0 is greedy decoding.

    top_p, top_k: None for the model's own, else all tokens. drop_oldest: go on where the context is full, see
    `TextGenerator.generate`; else the answer ends there.
    Raises UsageError for parameters that contradict each other.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    num_beams: int = 1
    prefill_chunk: int | None = None
    seed: int = 0
    drop_oldest: bool = False
    prompt_lookup: int | None = None

    def __post_init__(self) -> None:
        if self.temperature == float("inf"):
            raise UsageError("--temperature inf: must be a number, like 0.7")
        if 0 < self.temperature < 2**-149:  # 0 in float32, by which transformers divides the logits
            raise self.too_cold()
        sampled = {"--top-p": self.top_p not in (None, 1.0), "--top-k": bool(self.top_k)}
        for flag in (flag for flag, is_set in sampled.items() if is_set and self.temperature == 0):
            raise UsageError(f"{flag} needs sampling: add --temperature, for example --temperature 0.7")
        if self.num_beams > 1 and self.temperature > 0:
            raise UsageError("--num-beams (beam search) with --temperature (sampling): use one of them")
        if self.num_beams > 1 and self.drop_oldest:
            raise UsageError("--num-beams (beam search) with --when-full drop-oldest: use one of them")
        other = "--num-beams" if self.num_beams > 1 else "--prefill-chunk" if self.prefill_chunk is not None else None
        if self.prompt_lookup is not None and other is not None:
            raise UsageError(f"--prompt-lookup with {other}: transformers does not combine them; use one of them")

    def too_cold(self) -> UsageError:
        """The error of a temperature by which logits cannot be divided."""
        return UsageError(f"--temperature {self.temperature}: too small; raise it, or leave it out for greedy decoding")

    def model_sampling(self, defaults: Mapping[str, float]) -> dict[str, float]:
        """Those of the model's sampling settings `defaults` that apply: none to greedy decoding and beam search."""
        given = {"top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in defaults.items() if self.temperature > 0 and given.get(name) is None}

    def arguments(self, max_new_tokens: int, defaults: Mapping[str, float]) -> dict[str, Any]:
        """Settings of transformers' `GenerationConfig`. defaults: the model's sampling settings."""
        arguments: dict[str, Any] = {"max_new_tokens": max_new_tokens, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            top_p, top_k = 1.0 if self.top_p is None else self.top_p, self.top_k or 0
            arguments |= {"temperature": self.temperature, "top_p": top_p, "top_k": top_k}
            arguments |= self.model_sampling(defaults)
        if self.num_beams > 1:
            arguments["num_beams"] = self.num_beams
        if self.prefill_chunk is not None:
            arguments["prefill_chunk_size"] = self.prefill_chunk
        if self.prompt_lookup is not None:
            arguments["prompt_lookup_num_tokens"] = self.prompt_lookup
        return arguments


@dataclass(frozen=True)
class GeneratedText:
    """A generated answer with its timing and the report of its cache.

    ids: the new tokens, stop token included. rate: tokens per second after the first new token; None for a single token
    and for beam search. cache: `CacheReport.to_dict()`; empty for an uncompressed cache of transformers. longer: how
    large the cache of a longer text is; see `longer_text`. is_cut: the answer ends where the context is full.
    is_limited: it ends at --max-new-tokens. dropped: the oldest tokens that were left out behind the first ones.
    """

    text: str
    ids: list[int]
    prompt_tokens: int
    seconds: float
    prefill_seconds: float | None
    rate: float | None
    cache: dict[str, Any]
    longer: str = ""
    is_cut: bool = False
    dropped: int = 0
    is_limited: bool = False

    @property
    def held_tokens(self) -> int:
        """Tokens of the prompt and the answer, but for those that were dropped."""
        return self.prompt_tokens + len(self.ids) - self.dropped

    @property
    def is_empty(self) -> bool:
        """Whether the first token was a stop token, or the tokens have no text."""
        return not self.text

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.ids),
            "dropped_tokens": self.dropped,
            "at_limit": self.is_limited,
            "seconds": round(self.seconds, 4),
            "prefill_seconds": None if self.prefill_seconds is None else round(self.prefill_seconds, 4),
            "tokens_per_second": None if self.rate is None else round(self.rate, 2),
            "cache": self.cache,
        }

    def notes(self, loaded: LoadedModel) -> list[str]:
        """Say what the limits of the answer and of the model's context made of it."""
        limited = f"the answer ends at the limit of {len(self.ids):,} tokens; raise --max-new-tokens for a longer one"
        notes = [limited] if self.is_limited else []
        if not self.dropped and not self.is_cut:
            return notes
        full = f"the context of {loaded.name} ({loaded.context:,} tokens) was full: "
        if self.is_cut:
            return [f"{full}the answer ends there; --when-full drop-oldest drops the oldest tokens and goes on"]
        return [f"{full}{self.dropped:,} tokens were dropped, the oldest; the others were read anew", *notes]

    def summary(self) -> str:
        """Two lines for stderr: speed, and cache size compared with 16 bit."""
        speed = f", {self.rate:.1f} tokens/s" if self.rate is not None else ""
        prefill = f" after {self.prefill_seconds:.2f} s of prefill" if self.prefill_seconds is not None else ""
        return (
            f"{len(self.ids)} tokens in {self.seconds:.2f} s{speed}{prefill}; prompt {self.prompt_tokens} tokens\n"
            + cache_line(self.cache, self.longer)
        )


@dataclass
class TextGenerator:
    """A loaded model with an attached method.

    method: its name and options, as `resolve.describe` returns them. notes: lines that name it, and artifacts that were
    passed over.
    """

    loaded: LoadedModel
    attached: Attached
    method: dict[str, Any]
    decoding: Decoding
    notes: list[str] = field(default_factory=list)

    def check_prompt(self, prompt_tokens: int) -> None:
        """Raise UsageError if the prompt alone fills the context, and no tokens may be dropped."""
        context = self.loaded.context
        if prompt_tokens >= context and not self.decoding.drop_oldest:
            raise UsageError(
                f"the prompt has {prompt_tokens} tokens, the context of {self.loaded.name} {context}: shorten it, or "
                "drop its oldest tokens with --when-full drop-oldest"
            )

    def new_cache(self, prompt_tokens: int) -> CompressedCache:
        """An empty cache with room for an answer to a prompt of so many tokens."""
        tokens = prompt_tokens + self.decoding.max_new_tokens + (self.decoding.prompt_lookup or 0)
        return self.attached.new_cache(min(tokens, self.loaded.context))

    def _newest(self, ids: list[int], first: int) -> list[int]:
        """As many tokens of a text as fill half the context: its first ones and its newest ones. The first are `first`
        tokens, or those that the method keeps as attention sinks, or 4; a quarter of the context at most."""
        half = self.loaded.context // 2
        sinks = (stream.window.sinks for plan in self.attached.plans for stream in plan.kept)
        first = min(max(first, MIN_SINKS, *sinks), half // 2)
        return ids[:first] + ids[first - half :]

    def generate(
        self,
        ids: list[int],
        cache: CompressedCache | None,
        write: Callable[[str], None],
        stop: Callable[[], bool] | None = None,
        attempt: int = 0,
        first: int = 0,
    ) -> GeneratedText:
        """Continue the tokens `ids`, a prefix of which `cache` may hold; `write` gets each new piece of text.

        Where the context is full, the answer ends. With `drop_oldest`, the first and the newest tokens, half a context
        together, are read anew into a new cache, as a text of these tokens alone, and continued.

        cache: None: transformers' own, uncompressed. stop: called after each token; True ends the text, and leaves the
        cache as a text that ended by itself. attempt: added to the seed, for other samples. first: tokens that are
        never dropped, such as a system message; see `_newest`.
        """
        import torch
        from transformers import StoppingCriteriaList

        from kvq_cli.evaluation.generation import continue_ids, pad_token, sampling_defaults, stop_tokens

        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        self.check_prompt(len(ids))
        context, drops = self.loaded.context, self.decoding.drop_oldest
        torch.manual_seed(self.decoding.seed + attempt)
        streamer = CharacterStreamer(tokenizer, write)
        stops = stop_tokens(self.loaded)
        defaults = sampling_defaults(model)
        ends = {"eos_token_id": stops or None, "pad_token_id": pad_token(self.loaded, stops)}
        arguments: dict[str, Any] = {}
        if self.decoding.num_beams == 1:
            arguments["streamer"] = streamer  # beam search knows its answer only at the end
        if stop is not None:
            arguments["stopping_criteria"] = StoppingCriteriaList(
                [lambda ids, _: ids.new_full(ids.shape[:1], stop(), dtype=torch.bool)]
            )
        start = time.perf_counter()
        answer = _Answer(ids, cache)
        try:
            while not answer.is_done:
                if drops and len(answer.held) >= context:
                    answer.drop(self._newest(answer.held, first), self.new_cache)
                room = min(self.decoding.max_new_tokens - len(answer.ids), context - len(answer.held))
                settings = self.decoding.arguments(room, defaults) | ends
                prompt = torch.tensor([answer.held], device=model.device)
                out = continue_ids(model, prompt, torch.ones_like(prompt), answer.cache, settings, **arguments)
                answer.add(out[0, len(answer.held) :].tolist())
                stopped = answer.ids[-1] in stops
                ended = len(answer.ids) == self.decoding.max_new_tokens or stopped
                answer.is_cut = not ended and len(answer.held) == context and not (stop is not None and stop())
                answer.is_done = not answer.is_cut or not drops
        except RuntimeError as error:
            if "probability tensor" not in str(error):
                raise
            raise self.decoding.too_cold() from error
        except ValueError as error:
            if not self.decoding.model_sampling(defaults):
                raise
            raise KvqError(f"the model's generation_config.json: {reason(error)}") from error
        self.attached.check_steps()
        seconds = time.perf_counter() - start
        if self.decoding.num_beams > 1:
            streamer.put(prompt)
            streamer.put(torch.tensor(answer.ids))
        streamer.finish()
        prefill_seconds = streamer.first_token_time - start if self.decoding.num_beams == 1 else None
        rate = None
        if prefill_seconds is not None and len(answer.ids) > 1:
            rate = (len(answer.ids) - 1) / (seconds - prefill_seconds)
        report = {} if answer.cache is None else self.attached.report(answer.cache).to_dict()
        longer = longer_text(report, self.attached.method, self.loaded) if report else ""
        text = "".join(streamer.pieces)
        timed = seconds, prefill_seconds, rate
        limited = not stopped and len(answer.ids) == self.decoding.max_new_tokens
        ends_at = answer.is_cut, answer.dropped, limited
        return GeneratedText(text, answer.ids, len(ids), *timed, report, longer, *ends_at)


@dataclass
class _Answer:
    """An answer while it is generated.

    held: the tokens of the text, of which `cache` has all but the last. ids: the new ones. dropped: how many were lost.
    """

    held: list[int]
    cache: CompressedCache | None
    ids: list[int] = field(default_factory=list)
    dropped: int = 0
    is_cut: bool = False
    is_done: bool = False

    def add(self, ids: list[int]) -> None:
        self.held, self.ids = self.held + ids, self.ids + ids

    def drop(self, kept: list[int], new_cache: Callable[[int], CompressedCache]) -> None:
        """Keep these tokens of the text alone, which are to be read into a new cache."""
        self.dropped += len(self.held) - len(kept)
        self.held, self.cache = kept, None if self.cache is None else new_cache(len(kept))


@contextmanager
def attached_generator(
    model_options: opt.ModelOptions, compression: opt.CompressionOptions, prefill: str, decoding: Decoding
) -> Iterator[TextGenerator]:
    """Load the model and attach the method; a given method is resolved first, because loading takes longer."""
    from kvq_cli.cli.best_artifact import default_method, method_line
    from kvq_cli.resolve import describe, resolve

    if compression.is_default:
        loaded = model_options.load()
        attachable, reason, notes = default_method(loaded.name, compression.bits, has_weights_of(loaded))
    else:
        attachable = resolve(
            model_options.model,
            compression.method,
            compression.bits,
            compression.artifact,
            opt.method_options(compression.set_),
            trust_remote_code=model_options.trust_remote_code,
        )
        loaded, reason, notes = model_options.load(), "", []
    from kvq_cli.attention.attach import attach  # PyTorch is there once the model is loaded

    with attach(loaded.model, attachable, prefill=prefill, backend=model_options.backend) as attached:
        notes.append(method_line(attached.method, attachable, reason))
        notes += _sampling_notes(loaded, decoding)
        if decoding.prefill_chunk is not None and _is_fit_to_prompts(attached):
            notes.append(
                f"{attached.method.name} is fit to the first {decoding.prefill_chunk} tokens of the prompt alone, "
                "since --prefill-chunk divides it: its errors may be larger"
            )
        yield TextGenerator(loaded, attached, describe(attachable), decoding, notes)


def has_weights_of(loaded: LoadedModel) -> Callable[[Artifact], bool]:
    """Whether an artifact was calibrated for these weights."""
    from kvq_cli.artifact import fingerprint

    model = cache(lambda: fingerprint(loaded.model))
    return lambda artifact: artifact.fingerprint == model()


def _sampling_notes(loaded: LoadedModel, decoding: Decoding) -> list[str]:
    """A line that names the sampling settings taken from the model; none where no such setting applies."""
    from kvq_cli.evaluation.generation import sampling_defaults

    applied = decoding.model_sampling(sampling_defaults(loaded.model))
    listed = ", ".join(f"{name} {value:g}" for name, value in applied.items())
    return [f"sampling as {loaded.name} is configured: {listed}"] if applied else []


def _is_fit_to_prompts(attached: Attached) -> bool:
    """Whether the method takes norms, a subspace or saliency from the prompt's first pass."""
    from kvq_cli.codecs.base import PromptCodec

    return any(isinstance(stream.codec, PromptCodec) for plan in attached.plans for stream in plan.kept)


def check_utf8(text: str, name: str) -> None:
    """UsageError for text read from bytes that are not UTF-8: Python holds them as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{name} is not UTF-8 text") from None


def write_stdout(text: str) -> None:
    """Write a piece of text to stdout and flush; a terminal gets no control characters."""
    sys.stdout.write(escaped_answer(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()

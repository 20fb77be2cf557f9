"""What `kvq generate` and `kvq chat` share: a model under an attached method that answers token ids with text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvq_cli.cli import options as opt
from kvq_cli.cli.output import human_bytes
from kvq_cli.errors import UsageError

if TYPE_CHECKING:
    from kvq_cli.attention.attach import Attached
    from kvq_cli.cache.cache import CompressedCache
    from kvq_cli.models import LoadedModel


@dataclass(frozen=True)
class Decoding:
    """How the next token is chosen. Temperature 0 is greedy."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    num_beams: int = 1
    prefill_chunk: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature == float("inf"):
            raise UsageError("--temperature inf: must be a number, like 0.7")
        sampled = {"--top-p": self.top_p != 1.0, "--top-k": self.top_k != 0}
        for flag in (flag for flag, is_set in sampled.items() if is_set and self.temperature == 0):
            raise UsageError(f"{flag} chooses among sampled tokens: add --temperature, for example --temperature 0.7")
        if self.num_beams > 1 and self.temperature > 0:
            raise UsageError("--num-beams searches, --temperature samples: use one of them")

    def arguments(self, new_tokens: int) -> dict[str, Any]:
        """As keyword arguments of transformers' `generate`."""
        chosen: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": self.temperature > 0}
        if self.temperature > 0:
            chosen |= {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        if self.num_beams > 1:
            chosen["num_beams"] = self.num_beams
        if self.prefill_chunk is not None:
            chosen["prefill_chunk_size"] = self.prefill_chunk
        return chosen


@dataclass(frozen=True)
class Answer:
    """One answer. ids: the new tokens, a stop token included. rate: new tokens per second after the first, or None."""

    text: str
    ids: list[int]
    prompt_tokens: int
    seconds: float
    prefill_seconds: float | None
    rate: float | None
    cache: dict

    def to_dict(self) -> dict:
        return {
            "text": self.text,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": len(self.ids),
            "seconds": round(self.seconds, 4),
            "prefill_seconds": None if self.prefill_seconds is None else round(self.prefill_seconds, 4),
            "tokens_per_second": None if self.rate is None else round(self.rate, 2),
            "cache": self.cache,
        }

    def summary(self) -> str:
        """The two lines for stderr: speed, and cache bytes against 16 bit."""
        speed = f", {self.rate:.1f} tokens/s" if self.rate is not None else ""
        prefill = f" after {self.prefill_seconds:.2f} s for the prompt" if self.prefill_seconds is not None else ""
        return (
            f"{len(self.ids)} tokens in {self.seconds:.2f} s{speed}{prefill}; prompt {self.prompt_tokens} tokens\n"
            + cache_line(self.cache)
        )


def cache_line(report: dict) -> str:
    """`cache: 1.2 MiB instead of 7.1 MiB in 16 bit (5.9x smaller), 2.71 bits per number (nominal 2)`"""
    held, plain = report["bytes"], report["fp16_bytes"]
    if not held:
        return "cache: empty"
    shared = report["constant_bytes"]
    ratio = f"{plain / held:.1f}x smaller" if held <= plain else f"{held / plain:.1f}x larger: windows are not full yet"
    return (
        f"cache: {human_bytes(held)} instead of {human_bytes(plain)} in 16 bit ({ratio}), "
        f"{report['measured_bits']:.2f} bits per number (nominal {report['nominal_bits']:g})"
        + (f"; shared by all sequences: {human_bytes(shared)}" if shared else "")
        + (f"; attention by {report['backend']}" if report.get("backend") else "")
    )


@dataclass
class Answerer:
    """A loaded model with a method attached to it; `method` names it with its options."""

    loaded: LoadedModel
    attached: Attached
    method: dict
    decoding: Decoding

    def room(self, prompt_tokens: int) -> int:
        """New tokens that fit; UsageError where the prompt alone fills the context."""
        context = self.loaded.context
        if prompt_tokens >= context:
            raise UsageError(
                f"the prompt has {prompt_tokens} tokens, the context of {self.loaded.name} {context}: shorten it"
            )
        return min(self.decoding.max_new_tokens, context - prompt_tokens)

    def answer(self, ids: list[int], cache: CompressedCache, write: Callable[[str], None]) -> Answer:
        """Continue `ids`, the beginning of which `cache` may hold already; text goes to `write` as it comes."""
        import torch

        model, tokenizer = self.loaded.model, self.loaded.tokenizer
        new_tokens = self.room(len(ids))
        prompt = torch.tensor([ids], device=model.device)
        torch.manual_seed(self.decoding.seed)
        stream = Stream(tokenizer, write)
        arguments = self.decoding.arguments(new_tokens)
        if self.decoding.num_beams == 1:
            arguments["streamer"] = stream  # beam search knows its answer only at the end
        if tokenizer.pad_token_id is None:
            arguments["pad_token_id"] = tokenizer.eos_token_id
        start = time.perf_counter()
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, **arguments)
        seconds = time.perf_counter() - start
        found = out[0, len(ids) :].tolist()
        if self.decoding.num_beams > 1:
            stream.put(prompt)
            stream.put(torch.tensor(found))
            stream.end()
        first = stream.first - start if self.decoding.num_beams == 1 else None
        rate = (len(found) - 1) / (seconds - first) if first is not None and len(found) > 1 else None
        report = self.attached.report(cache).to_dict()
        return Answer("".join(stream.pieces), found, len(ids), seconds, first, rate, report)


@dataclass
class Stream:
    """A streamer for transformers' `generate`: hands on text as soon as its bytes make whole characters."""

    tokenizer: Any
    write: Callable[[str], None]
    first: float = 0.0  # time of the first new token
    pieces: list[str] = field(default_factory=list)
    _prompt_seen: bool = False
    _ids: list[int] = field(default_factory=list)
    _shown: int = 0

    def put(self, tokens: Any) -> None:
        if not self._prompt_seen:  # generate's first call brings the prompt
            self._prompt_seen = True
            return
        self.first = self.first or time.perf_counter()
        self._ids += tokens.flatten().tolist()
        text = self._text()
        if not text.endswith("\ufffd"):  # half of a character
            self._show(text)
            if text.endswith("\n"):
                self._ids, self._shown = [], 0  # a line is done: no need to decode it again with each token

    def end(self) -> None:
        self._show(self._text())

    def _text(self) -> str:
        return self.tokenizer.decode(self._ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _show(self, text: str) -> None:
        if piece := text[self._shown :]:
            self.pieces.append(piece)
            self.write(piece)
            self._shown = len(text)


@contextmanager
def answering(
    computing: opt.Computing, compression: opt.Compression, prefill: str, decoding: Decoding
) -> Iterator[Answerer]:
    """Resolve the method (before the model, which takes longer), load the model, attach."""
    from kvq_cli.attention.attach import attach
    from kvq_cli.cli.resolve import describe, resolve
    from kvq_cli.models import load_model

    options = opt.method_options(compression.set_)
    chosen = resolve(computing.model, compression.method, compression.bits, compression.artifact, options)
    loaded = load_model(computing.model, computing.device, computing.dtype)
    with attach(loaded.model, chosen, prefill=prefill, backend=computing.backend) as attached:
        yield Answerer(loaded, attached, describe(chosen), decoding)


def check_text(text: str, what: str) -> None:
    """UsageError for bytes that were no UTF-8, which Python hands on as lone surrogates and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{what} is not UTF-8 text") from None


def to_stdout(text: str) -> None:
    """Write a piece of an answer at once."""
    sys.stdout.write(text)
    sys.stdout.flush()

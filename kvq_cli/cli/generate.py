"""`kvq generate`: continue a prompt with a compressed cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.option_groups import grouped
from kvq_cli.cli.text_generator import Decoding, answering, check_text, to_stdout
from kvq_cli.errors import KvqError, UsageError

_decoding = partial(typer.Option, rich_help_panel="Decoding")

Prompt = Annotated[str | None, typer.Argument(metavar="PROMPT", help="The prompt; without it --file or stdin is read.")]
File = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from a text file.")]
MaxNewTokens = Annotated[int, _decoding("--max-new-tokens", "-n", min=1, help="Stop after so many tokens.")]
Temperature = Annotated[float, _decoding("--temperature", min=0.0, help="Above 0: sample; 0: take the likeliest.")]
TopP = Annotated[float, _decoding("--top-p", min=0.0, max=1.0, help="Sample from this share of the probability.")]
TopK = Annotated[int, _decoding("--top-k", min=0, help="Sample from so many likeliest tokens; 0: all.")]
Beams = Annotated[int, _decoding("--num-beams", min=1, help="Beam search with so many beams.")]
Chunk = Annotated[
    int | None, _decoding("--prefill-chunk", min=1, help="Take the prompt in chunks of so many tokens, to save memory.")
]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    max_new_tokens: MaxNewTokens = 128
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    prefill_chunk: Chunk = None

    def decoding(self, seed: int, num_beams: int = 1) -> Decoding:
        """UsageError for flags that do not go together."""
        return Decoding(
            self.max_new_tokens, self.temperature, self.top_p, self.top_k, num_beams, self.prefill_chunk, seed
        )


@grouped
def generate(
    sampling: Sampling,
    compression: opt.Compression,
    computing: opt.Computing,
    reporting: opt.Reporting,
    prompt: Prompt = None,
    file: File = None,
    num_beams: Beams = 1,
    prefill: opt.Prefill = "exact",
) -> None:
    """Continue a prompt; the text streams to stdout, speed and cache size go to stderr."""
    out = reporting.output()
    text = _read(prompt, file)
    with answering(computing, compression, prefill, sampling.decoding(computing.seed, num_beams)) as answerer:
        ids = answerer.loaded.tokenizer(text)["input_ids"]
        room = answerer.room(len(ids))
        if room < sampling.max_new_tokens:
            out.note(f"the context of {answerer.loaded.name} leaves room for {room} new tokens")
        cache = answerer.attached.new_cache(len(ids) + room)
        answer = answerer.answer(ids, cache, (lambda piece: None) if reporting.as_json else to_stdout)
    if not reporting.as_json:
        to_stdout("\n")
    out.note(answer.summary())
    out.result({"model": answerer.loaded.name, "method": answerer.method, "prefill": prefill, **answer.to_dict()})


def _read(prompt: str | None, file: Path | None) -> str:
    """The prompt from the argument, the file or stdin, without the line break at its end."""
    if prompt is not None and file is not None:
        raise UsageError("give PROMPT or --file, not both")
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
        except OSError as error:
            raise KvqError(f"--file {file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise KvqError(f"--file {file}: not UTF-8 text") from None
    elif prompt is not None:
        text = prompt
    elif sys.stdin.isatty():
        raise UsageError("no prompt: give PROMPT, --file FILE, or text on stdin")
    else:
        text = sys.stdin.read()
    check_text(text, "the prompt")
    text = text.removesuffix("\n")
    if not text.strip():
        raise UsageError("the prompt is empty: give PROMPT, --file FILE, or text on stdin")
    return text

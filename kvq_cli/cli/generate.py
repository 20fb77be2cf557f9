"""`kvq generate`: generate text from a prompt with a compressed cache."""

from __future__ import annotations

import errno
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.option_groups import grouped
from kvq_cli.cli.prompt_cache import check_files, load_document, save_document
from kvq_cli.cli.rules import either, unless
from kvq_cli.cli.text_generator import Decoding, attached_generator, check_utf8, write_stdout
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.files import MAX_TEXT, read_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvq_cli.models import LoadedModel

_decoding = partial(typer.Option, rich_help_panel="Decoding")

Prompt = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT", help="The prompt; without it, or as -, --file or stdin is read, final line break included."
    ),
]
File = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from a text file.")]
MaxNewTokens = Annotated[int, _decoding("--max-new-tokens", "-n", min=1, help="Maximum number of new tokens.")]
Temperature = Annotated[float, _decoding("--temperature", min=0.0, help="Sampling temperature; 0: greedy decoding.")]
TopP = Annotated[
    float | None,
    _decoding(
        "--top-p",
        min=0.0,
        max=1.0,
        help="Sample from the likeliest tokens with this total probability (default: the model's, or 1: all).",
    ),
]
TopK = Annotated[
    int | None,
    _decoding("--top-k", min=0, help="Sample from this many likeliest tokens; 0: all (default: the model's, or 0)."),
]
Beams = Annotated[int, _decoding("--num-beams", min=1, help="Number of beams; above 1: beam search.")]
PromptLookup = Annotated[
    int | None,
    _decoding(
        "--prompt-lookup",
        min=1,
        help="Draft up to this many tokens from what followed the last ones before, and check them in one pass: the "
        "same tokens, in fewer passes where the answer repeats the prompt.",
    ),
]
Chunk = Annotated[
    int | None,
    _decoding(
        "--prefill-chunk",
        min=1,
        help="Prefill in chunks of this many tokens, to save memory. innerq, squat, zipcache and gear are then fit "
        "to the first chunk alone.",
    ),
]
WhenFull = Annotated[
    Literal["stop", "drop-oldest"],
    _decoding(
        "--when-full",
        help="Where the context is full: end the answer, or drop the oldest tokens behind the first ones, lose what "
        "they say, and go on.",
    ),
]
Raw = Annotated[
    bool,
    typer.Option(
        "--raw",
        help="Do not apply the chat template: continue the prompt as plain text (default: apply it if the tokenizer "
        "has one).",
    ),
]
System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="System message; needs a tokenizer with a chat template."),
]
SaveCache = Annotated[
    Path | None,
    typer.Option(
        "--save-cache",
        metavar="FILE",
        help="Prefill the prompt and write its packed cache to a safetensors file; nothing is generated.",
    ),
]
LoadCache = Annotated[
    Path | None,
    typer.Option(
        "--load-cache",
        metavar="FILE",
        help="Continue a document saved by --save-cache: the prompt follows it on a new line.",
    ),
]
#: `kvq chat` has no --save-cache.
_generates = unless(lambda values: values.get("save_cache") is None, "--save-cache generates nothing")
_samples = unless(lambda values: values["temperature"] > 0, "decoding is greedy without --temperature")


@dataclass(frozen=True)
class DecodingOptions:
    """Decoding options shared with `kvq chat`."""

    max_new_tokens: Annotated[MaxNewTokens, _generates] = 128
    temperature: Annotated[Temperature, _generates] = 0.0
    top_p: Annotated[TopP, _generates] = None
    top_k: Annotated[TopK, _generates] = None
    prefill_chunk: Chunk = None
    when_full: Annotated[WhenFull, _generates] = "stop"

    def decoding(self, seed: int, num_beams: int = 1, prompt_lookup: int | None = None) -> Decoding:
        """Decoding parameters; UsageError for flags that contradict each other."""
        sampling = self.temperature, self.top_p, self.top_k
        drops = self.when_full == "drop-oldest"
        return Decoding(self.max_new_tokens, *sampling, num_beams, self.prefill_chunk, seed, drops, prompt_lookup)


@dataclass(frozen=True)
class SamplingModelOptions(opt.ModelOptions):
    """The model, and the seed of sampling; shared with `kvq chat`."""

    seed: Annotated[opt.Seed, either(_generates, _samples)] = 0


@grouped
def generate(
    decoding: DecodingOptions,
    compression: opt.CompressionOptions,
    model_options: SamplingModelOptions,
    output: opt.OutputOptions,
    prompt: Prompt = None,
    file: File = None,
    raw: Raw = False,
    system: System = None,
    num_beams: Annotated[Beams, _generates] = 1,
    prompt_lookup: Annotated[PromptLookup, _generates] = None,
    prefill: opt.Prefill = "exact",
    save_cache: SaveCache = None,
    load_cache: LoadCache = None,
) -> None:
    """Generate text from a prompt with a compressed cache: text on stdout; method, speed and cache size on stderr."""
    out = output.output()
    from kvq_cli.evaluation.chat_template import chat_opening, uses_chat_template

    if raw and system is not None:
        raise UsageError("--raw with --system: plain text has no system message; use one of them")
    text = _read_prompt(prompt, file)
    parameters = decoding.decoding(model_options.seed, num_beams, prompt_lookup)
    check_files(save_cache, load_cache)
    if prompt_lookup is not None and load_cache is not None:
        raise UsageError("--prompt-lookup with --load-cache: transformers drafts for new caches only; use one of them")
    if system is not None and load_cache is not None:
        raise UsageError("--system with --load-cache: the system message is saved with the document, by --save-cache")
    with attached_generator(model_options, compression, prefill, parameters) as generator:
        template = False if raw else None
        chat = uses_chat_template(generator.loaded, template)
        messages = _messages(generator.loaded, text, system)
        options = {"model": generator.loaded.label, "method": generator.method, "prefill": prefill}
        if save_cache is not None:
            saved = save_document(generator, save_cache, messages, chat)
            out.note("\n".join([*generator.notes, saved.summary()]))
            out.result({**options, "chat_template": chat, **saved.to_dict()})
            return
        cache = None
        if load_cache is not None:
            ids, cache = load_document(generator, load_cache, text, template)
            chat = cache.loaded is not None and cache.loaded.template is not None
        else:
            ids = _encode(generator.loaded.tokenizer, messages, chat)
        generator.check_prompt(len(ids))
        for line in generator.notes:
            out.note(line)
        if cache is None:
            cache = generator.new_cache(len(ids))
        first = chat_opening(generator.loaded.tokenizer, messages[:-1]) if chat and parameters.drop_oldest else 0
        write = (lambda piece: None) if output.as_json else write_stdout
        generated = generator.generate(ids, cache, write, first=first)
    if not output.as_json:
        write_stdout("\n")
    if generated.is_empty:
        out.note("the answer is empty: the model's first token was a stop token")
    for line in generated.notes(generator.loaded):
        out.note(line)
    out.note(generated.summary())
    if chat:
        out.note("the prompt was sent in the model's chat template; --raw continues it as it is")
    out.result({**options, "chat_template": chat, **generated.to_dict()})


def _messages(loaded: LoadedModel, text: str, system: str | None) -> list[dict[str, str]]:
    """The prompt as messages for a chat template; UsageError where the template has no system message."""
    from kvq_cli.evaluation.chat_template import check_system, system_message

    messages = [{"role": "user", "content": text}]
    if system is None:
        return messages
    check_utf8(system, "--system")
    check_system(loaded, system)
    return [system_message(system), *messages]


def _encode(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], chat: bool) -> list[int]:
    """Token ids of the prompt, in the chat template or as it is."""
    from kvq_cli.evaluation.chat_template import chat_prompt, encode_prompt

    text = chat_prompt(tokenizer, messages) if chat else messages[-1]["content"]
    return encode_prompt(tokenizer, text, not chat)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """Read the prompt from the argument, the file or stdin (also `-`): the text as it is, without a byte order mark."""
    prompt = None if prompt == "-" else prompt
    if prompt is not None and file is not None:
        raise UsageError("give PROMPT or --file, not both")
    if file is not None:
        try:
            text = read_text(file, MAX_TEXT)
        except OSError as error:
            hint = "; pipe it to stdin, without --file" if error.errno == errno.EINVAL else ""
            raise KvqError(f"--file {file}: {error.strerror}{hint}") from None
        except UnicodeDecodeError:
            raise UsageError(f"--file {file}: not UTF-8 text") from None
    elif prompt is not None:
        text = prompt
    elif sys.stdin.isatty():
        raise UsageError("no prompt: give PROMPT, --file FILE, or text on stdin")
    else:
        text = sys.stdin.read()
    check_utf8(text, "the prompt")
    text = text.removeprefix("\ufeff")
    if not text.strip():
        raise UsageError("the prompt is empty: give PROMPT, --file FILE, or text on stdin")
    return text

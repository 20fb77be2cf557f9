"""`kvq generate`: generate text from a prompt with a compressed cache."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.option_groups import grouped
from kvq_cli.cli.prompt_cache import check_files, load_document, save_document
from kvq_cli.cli.text_generator import Decoding, attached_generator, check_utf8, write_stdout
from kvq_cli.errors import KvqError, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_decoding = partial(typer.Option, rich_help_panel="Decoding")

Prompt = Annotated[
    str | None, typer.Argument(metavar="PROMPT", help="The prompt; without it, --file or stdin is read.")
]
File = Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="Read the prompt from a text file.")]
MaxNewTokens = Annotated[int, _decoding("--max-new-tokens", "-n", min=1, help="Maximum number of new tokens.")]
Temperature = Annotated[float, _decoding("--temperature", min=0.0, help="Sampling temperature; 0: greedy decoding.")]
TopP = Annotated[
    float, _decoding("--top-p", min=0.0, max=1.0, help="Sample from the likeliest tokens with this total probability.")
]
TopK = Annotated[int, _decoding("--top-k", min=0, help="Sample from this many likeliest tokens; 0: all.")]
Beams = Annotated[int, _decoding("--num-beams", min=1, help="Number of beams; above 1: beam search.")]
Chunk = Annotated[
    int | None, _decoding("--prefill-chunk", min=1, help="Prefill in chunks of this many tokens, to save memory.")
]
ChatTemplate = Annotated[
    bool | None,
    typer.Option(
        "--chat-template/--no-chat-template",
        help="Send the prompt as a user's message in the tokenizer's chat template, or continue it as it is (default: "
        "the template, where the tokenizer has one).",
    ),
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


@dataclass(frozen=True)
class DecodingOptions:
    """Decoding options shared with `kvq chat`."""

    max_new_tokens: MaxNewTokens = 128
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    prefill_chunk: Chunk = None

    def decoding(self, seed: int, num_beams: int = 1) -> Decoding:
        """Decoding parameters; UsageError for flags that contradict each other."""
        return Decoding(
            self.max_new_tokens, self.temperature, self.top_p, self.top_k, num_beams, self.prefill_chunk, seed
        )


@grouped
def generate(
    decoding: DecodingOptions,
    compression: opt.CompressionOptions,
    model_options: opt.ModelOptions,
    output: opt.OutputOptions,
    prompt: Prompt = None,
    file: File = None,
    chat_template: ChatTemplate = None,
    num_beams: Beams = 1,
    prefill: opt.Prefill = "exact",
    save_cache: SaveCache = None,
    load_cache: LoadCache = None,
) -> None:
    """Generate text from a prompt with a compressed cache: text goes to stdout, speed and cache size to stderr."""
    out = output.output()
    from kvq_cli.evaluation.chat_template import uses_chat_template

    text = _read_prompt(prompt, file)
    parameters = decoding.decoding(model_options.seed, num_beams)
    check_files(save_cache, load_cache)
    with attached_generator(model_options, compression, prefill, parameters) as generator:
        chat = uses_chat_template(generator.loaded, chat_template)
        options = {"model": generator.loaded.label, "method": generator.method, "prefill": prefill}
        if save_cache is not None:
            saved = save_document(generator, save_cache, [{"role": "user", "content": text}], chat)
            out.note(saved.summary())
            out.result({**options, "chat_template": chat, **saved.to_dict()})
            return
        cache = None
        if load_cache is not None:
            ids, cache = load_document(generator, load_cache, text, chat_template)
            chat = cache.loaded is not None and cache.loaded.template is not None
        else:
            ids = _encode(generator.loaded.tokenizer, text, chat)
        max_new_tokens = generator.max_new_tokens(len(ids))
        if max_new_tokens < decoding.max_new_tokens:
            out.note(f"the context of {generator.loaded.name} leaves room for {max_new_tokens} new tokens")
        if cache is None:
            cache = generator.attached.new_cache(len(ids) + max_new_tokens)
        generated = generator.generate(ids, cache, (lambda piece: None) if output.as_json else write_stdout)
    if not output.as_json:
        write_stdout("\n")
    out.note(generated.summary())
    if chat:
        out.note("the prompt was sent in the model's chat template; --no-chat-template continues it as it is")
    out.result({**options, "chat_template": chat, **generated.to_dict()})


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, chat: bool) -> list[int]:
    """Token ids of the prompt, as a user's message in the chat template or as it is."""
    from kvq_cli.evaluation.chat_template import chat_prompt

    if chat:
        text = chat_prompt(tokenizer, [{"role": "user", "content": text}])
    return tokenizer(text, add_special_tokens=not chat)["input_ids"]  # a chat template writes BOS itself


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """Read the prompt from the argument, the file or stdin, without a final line break."""
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
    check_utf8(text, "the prompt")
    text = text.removesuffix("\n")
    if not text.strip():
        raise UsageError("the prompt is empty: give PROMPT, --file FILE, or text on stdin")
    return text

"""`kvq generate --save-cache` and `--load-cache`: prefill a document once, and ask several questions about it.

A question continues the document on a new line: the text is that of both in one prompt. In a chat template the document
is the beginning of the user's message, the question its end.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli.cli.cache_lines import cache_line
from kvq_cli.cli.output import human_bytes
from kvq_cli.cli.text_generator import Decoding, GeneratedText, TextGenerator
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.files import check_writable, file_size

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvq_cli.cache.cache import CompressedCache
    from kvq_cli.cache.saved_cache import SavedPrompt

SAVE, LOAD = "--save-cache", "--load-cache"


def check_files(save: Path | None, load: Path | None) -> None:
    """Refuse files that cannot be written or read, before the model is loaded."""
    if save is not None and load is not None:
        raise UsageError(f"{SAVE} with {LOAD}: a saved document cannot be extended; save the whole document")
    if save is not None:
        if save.is_dir():
            raise UsageError(f"{SAVE} {save}: is a folder; give the name of a file")
        check_writable(save.parent, SAVE)
    if load is None:
        return
    try:
        file_size(load)
    except FileNotFoundError:
        raise KvqError(f"{LOAD} {load}: no such file; `kvq generate --file DOCUMENT {SAVE} {load}` writes it") from None
    except OSError as error:
        raise KvqError(f"{LOAD} {load}: {error.strerror}; give the file of a saved cache") from None


@dataclass(frozen=True)
class SavedDocument:
    """The result of `save_document`. file_bytes: the size of the file."""

    path: Path
    file_bytes: int
    prefilled: GeneratedText

    def summary(self) -> str:
        """Two lines for stderr: tokens and time, and the cache's size."""
        done = self.prefilled
        return (
            f"{done.prompt_tokens} tokens prefilled in {done.seconds:.2f} s, written to {self.path} "
            f"({human_bytes(self.file_bytes)})\n{cache_line(done.cache, done.longer)}"
        )

    def to_dict(self) -> dict[str, Any]:
        done = self.prefilled
        written = {"saved": str(self.path), "file_bytes": self.file_bytes, "prompt_tokens": done.prompt_tokens}
        return {**written, "seconds": round(done.seconds, 4), "cache": done.cache}


def save_document(generator: TextGenerator, path: Path, messages: list[dict[str, str]], chat: bool) -> SavedDocument:
    """Prefill the last message, which is left open, and write its cache; no answer is generated.

    messages: as chat templates take them, the document last. chat: put them into the chat template.
    """
    from torch import tensor

    from kvq_cli.cache.saved_cache import SavedPrompt
    from kvq_cli.evaluation.chat_template import encode_prompt

    tokenizer = generator.loaded.tokenizer
    text, document = _opened(tokenizer, messages, chat)
    ids = encode_prompt(tokenizer, text, not chat)
    cache = generator.attached.new_cache()
    settings = generator.decoding
    # The token that generation adds is not in the cache.
    one = Decoding(max_new_tokens=1, prefill_chunk=settings.prefill_chunk, seed=settings.seed)
    done = replace(generator, decoding=one).generate(ids, cache, lambda piece: None)
    prompt = SavedPrompt(tensor([ids]), text, document, _template(tokenizer) if chat else None)
    return SavedDocument(path, cache.save(path, prompt, SAVE), done)


def load_document(
    generator: TextGenerator, path: Path, question: str, chat: bool | None
) -> tuple[list[int], CompressedCache]:
    """Token ids of a saved document with a question after it, and the cache of the document, with a row for each beam.

    chat: whether a chat template is asked for; None: as the document was saved. Raises UsageError where the question
    cannot follow the document as it would in one prompt.
    """
    tokenizer = generator.loaded.tokenizer
    cache = generator.attached.load_cache(path, room=generator.decoding.max_new_tokens + len(question.encode()))
    saved = cache.loaded
    if saved is None or not saved.text:
        raise UsageError(f"{LOAD} {path}: it holds no text to continue: save it by `kvq generate {SAVE}`")
    held = saved.template is not None
    if chat is not None and chat != held:
        raise UsageError(f"{LOAD} {path}: the document was saved {'in a' if held else 'without a'} chat template")
    if held and saved.template != _template(tokenizer):
        raise UsageError(f"{LOAD} {path}: the document was saved in another chat template: save it again")
    ids = _continued(tokenizer, saved, question, path)
    if generator.decoding.num_beams > 1:
        cache.batch_repeat_interleave(generator.decoding.num_beams)
    return ids, cache


def _opened(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], chat: bool) -> tuple[str, int]:
    """(text up to the end of the document, characters of the document at its end)."""
    document = messages[-1]["content"]
    if not chat:
        return document, len(document)
    text, document = _rendered(tokenizer, messages), document.strip()
    return text[: _place(text, document) + len(document)], len(document)


def _continued(tokenizer: PreTrainedTokenizerBase, saved: SavedPrompt, question: str, path: Path) -> list[int]:
    """The saved ids, and those of the question: of the whole text, if its tokens begin with the saved ones."""
    from kvq_cli.evaluation.chat_template import encode_prompt

    held, chat = saved.ids[0].tolist(), saved.template is not None
    added = question if saved.text.endswith("\n") else f"\n{question}"
    if chat:
        document = saved.text[len(saved.text) - saved.document :]
        message = f"{document}\n{question.strip()}"
        text = _rendered(tokenizer, [{"role": "user", "content": message}])
        added = text[_place(text, message) + len(document) :]
    whole = encode_prompt(tokenizer, saved.text + added, not chat)
    if whole[: len(held)] == held:
        return whole
    if encode_prompt(tokenizer, saved.text, not chat) != held:
        raise UsageError(f"{LOAD} {path}: the document was saved with another tokenizer: save it again")
    return held + encode_prompt(tokenizer, added, special_tokens=False)


def _rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> str:
    from kvq_cli.evaluation.chat_template import chat_prompt

    return chat_prompt(tokenizer, messages)


def _place(text: str, message: str) -> int:
    """Where the message begins in the template's text; UsageError where the template changes it."""
    start = text.rfind(message)
    if start < 0:
        raise UsageError(
            "the model's chat template changes the message, so that a question cannot follow a saved document: "
            "add --raw"
        )
    return start


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    return hashlib.sha256(json.dumps(tokenizer.chat_template, sort_keys=True).encode()).hexdigest()

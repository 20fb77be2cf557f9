"""Prompts in a tokenizer's chat template, when it is applied, and their token ids."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvq_cli.errors import KvqError, UsageError, reading

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kvq_cli.models import LoadedModel


def uses_chat_template(loaded: LoadedModel, wanted: bool | None, default: bool = True) -> bool:
    """Whether prompts are put into the tokenizer's chat template.

    wanted: None for `default` where the tokenizer has a chat template. UsageError if it is wanted and there is none.
    """
    has_template = bool(getattr(loaded.tokenizer, "chat_template", None))
    if wanted and not has_template:
        raise UsageError(f"--chat-template: the tokenizer of {loaded.name} has none; drop the flag")
    return has_template and default if wanted is None else wanted


def encode_prompt(tokenizer: PreTrainedTokenizerBase, text: str, special_tokens: bool = True) -> list[int]:
    """Token ids of a text that the model is to continue: special tokens in front of it, such as BOS, but none behind
    it, such as the EOS of a tokenizer with `add_eos_token`.

    special_tokens: False for the text of a chat template, which writes BOS itself, and for the rest of a text.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=special_tokens, verbose=False).input_ids
    if not special_tokens or not ids or ids[-1] not in tokenizer.all_special_ids:
        return ids
    plain = encode_prompt(tokenizer, text, special_tokens=False)
    ends = range(len(ids), len(plain), -1)
    return next((ids[:end] for end in ends if ids[end - len(plain) : end] == plain), ids)


def check_system(loaded: LoadedModel, system: str) -> None:
    """UsageError unless the tokenizer's chat template writes the system message into the prompt."""
    if not uses_chat_template(loaded, None):
        raise UsageError(f"the tokenizer of {loaded.name} has no chat template, which a system message needs")
    if not system.strip():
        raise UsageError("the system message is empty")
    try:
        written = chat_prompt(loaded.tokenizer, [system_message(system), {"role": "user", "content": "?"}])
    except UsageError:
        written = ""
    if system.strip() not in written:
        raise UsageError(f"the chat template of {loaded.name} has no place for a system message")


def system_message(text: str) -> dict[str, str]:
    """The first message of a conversation, which instructs the model."""
    return {"role": "system", "content": text}


def chat_template_note(applied: Mapping[str, bool]) -> str | None:
    """A sentence on whether the chat template was applied, by task; None if no task has prompts."""
    tasks = {value: ", ".join(task for task in applied if applied[task] == value) for value in applied.values()}
    if len(tasks) > 1:
        return f"chat template: applied to {tasks[True]}; not to {tasks[False]}"
    return f"chat template: {'applied' if True in tasks else 'not applied'}" if tasks else None


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], add_generation_prompt: bool = True
) -> str:
    """Text of the messages in the tokenizer's chat template.

    messages: `{"role": ..., "content": ...}`. Without a generation prompt, the last message is left open to continue.
    UsageError where the template refuses them, KvqError where it fails.
    """
    import jinja2

    with reading(f"the chat template of {tokenizer.name_or_path} fails", "correct it"):
        try:
            text = tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        except jinja2.TemplateError as error:
            raise UsageError(f"the tokenizer's chat template refuses these messages: {error}") from error
    if not isinstance(text, str):
        raise KvqError("the tokenizer's chat template does not return text")
    return text


def chat_opening(tokenizer: PreTrainedTokenizerBase, system: list[dict[str, str]]) -> int:
    """Number of tokens that the chat template writes before the first user's message. system: the system message, if
    any."""
    texts = [chat_prompt(tokenizer, [*system, {"role": "user", "content": content}]) for content in ("0", "1")]
    return len(encode_prompt(tokenizer, os.path.commonprefix(texts), special_tokens=False))

"""Prompts in a tokenizer's chat template, and when it is applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvq_cli.errors import KvqError, UsageError

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
    """
    text = tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=not add_generation_prompt,
    )
    if not isinstance(text, str):
        raise KvqError("the tokenizer's chat template does not return text")
    return text

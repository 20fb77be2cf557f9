"""Prompts in a tokenizer's chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvq_cli.errors import KvqError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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

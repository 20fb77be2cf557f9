"""A conversation as token ids: each message appends tokens, so that the compressed cache of earlier turns is reused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvq_cli.reference import prompts

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvq_cli.cache.cache import CompressedCache
    from kvq_cli.cli.text_generator import GeneratedText, TextGenerator


@dataclass
class Conversation:
    """Messages, their token ids, and the cache with all tokens but the last."""

    generator: TextGenerator
    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    cache: CompressedCache | None = None

    def ask(self, message: str, write: Callable[[str], None]) -> GeneratedText:
        """Append a message and the generated answer; on an error, the conversation is unchanged."""
        messages = [*self.messages, {"role": "user", "content": message}]
        ids = self._extend_ids(messages)
        self.generator.max_new_tokens(len(ids))  # refuses a prompt that is too long before the cache is changed
        cache = self.cache
        if cache is None or ids[: len(self.ids)] != self.ids:
            cache = self.generator.attached.new_cache()
        self.cache = None  # an interrupted answer leaves the cache inconsistent: keep it only when complete
        answer = self.generator.generate(ids, cache, write)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.ids, self.cache = ids + answer.ids, cache
        return answer

    def clear(self) -> None:
        self.messages, self.ids, self.cache = [], [], None

    def _extend_ids(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of all messages, up to the beginning of the answer.

        Earlier answers keep the ids that were generated: decoding and encoding them again may give different ids.
        """
        tokenizer = self.generator.loaded.tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            text = reference_prompt(messages[-1]["content"])
            return self.ids + tokenizer(text, add_special_tokens=not self.ids)["input_ids"]
        from kvq_cli.evaluation.chat_template import chat_prompt

        text = chat_prompt(tokenizer, messages)
        past = tokenizer.decode(self.ids) if self.ids else ""
        if isinstance(past, str) and past and text.startswith(past):
            return self.ids + tokenizer(text[len(past) :], add_special_tokens=False)["input_ids"]
        return tokenizer(text, add_special_tokens=False)["input_ids"]


def reference_prompt(message: str) -> str:
    """Prompt for a model without a chat template, in the format of the reference model's training data.

    If the message ends in a question mark, its last sentence is the question, and the sentences before it are added to
    the context. Any other message is text to continue.
    """
    message = message.strip()
    if not message.endswith("?"):
        return prompts.prompt(message, "")
    question = re.split(r"(?<=[.!?])\s+|\n+", message)[-1]
    context = message.removesuffix(question).strip()
    question = prompts.passage_question(question)
    return prompts.prompt(context, question) if context else question

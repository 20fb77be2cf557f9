"""A conversation as token ids: which tokens a message adds, so that the compressed cache of the past is used again."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvq_cli.reference import prompts

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvq_cli.cache.cache import CompressedCache
    from kvq_cli.cli.text_generator import Answer, Answerer


@dataclass
class Conversation:
    """Messages, their token ids, and the cache that holds all but the last of them."""

    answerer: Answerer
    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    cache: CompressedCache | None = None

    def ask(self, message: str, write: Callable[[str], None]) -> Answer:
        """Add a message and its answer. The conversation is unchanged where an error ends this early."""
        messages = [*self.messages, {"role": "user", "content": message}]
        ids = self._extended(messages)
        self.answerer.room(len(ids))  # refused here, before the cache is touched
        reusable = self.cache is not None and ids[: len(self.ids)] == self.ids
        cache = self.cache if reusable else self.answerer.attached.new_cache()
        self.cache = None  # until the answer is whole: an interrupted one leaves a cache that fits nothing
        answer = self.answerer.answer(ids, cache, write)
        self.messages = [*messages, {"role": "assistant", "content": answer.text}]
        self.ids, self.cache = ids + answer.ids, cache
        return answer

    def clear(self) -> None:
        self.messages, self.ids, self.cache = [], [], None

    def _extended(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of all messages, up to where the answer begins.

        What was answered keeps the ids it was generated with: decoding and encoding them again may give others.
        """
        tokenizer = self.answerer.loaded.tokenizer
        if getattr(tokenizer, "chat_template", None) is None:
            added = plain_form(messages[-1]["content"])
            return self.ids + tokenizer(added, add_special_tokens=not self.ids)["input_ids"]
        whole = _templated(tokenizer, messages)
        past = tokenizer.decode(self.ids) if self.ids else ""
        if past and whole.startswith(past):
            return self.ids + tokenizer(whole[len(past) :], add_special_tokens=False)["input_ids"]
        return tokenizer(whole, add_special_tokens=False)["input_ids"]


def plain_form(message: str) -> str:
    """A message for a model without a chat template, in the form of the reference model's prompts.

    A message that ends in a question mark is asked as a question about all that came before it; what stands in front of
    its last sentence is added to the context. Any other message is text for the model to go on with.
    """
    message = message.strip()
    if not message.endswith("?"):
        return prompts.prompt(message, "")
    question = re.split(r"(?<=[.!?])\s+|\n+", message)[-1]
    context = message.removesuffix(question).strip()
    asked = prompts.passage_question(question)
    return prompts.prompt(context, asked) if context else asked


def _templated(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

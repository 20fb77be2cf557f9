"""A conversation as token ids: each message appends tokens, so that the compressed cache of earlier turns is reused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvq_cli.errors import UsageError
from kvq_cli.reference import prompts

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvq_cli.cache.cache import CompressedCache
    from kvq_cli.cli.text_generator import GeneratedText, TextGenerator


@dataclass
class Conversation:
    """Messages, their token ids, and the cache with all tokens but the last.

    messages: of the user and the model, in turns. system: the system message, if any. ids: without the next turn's;
    empty where they are to be encoded again. turn_start: number of ids before the last turn. attempt: of the last
    answer, counted from 0. note: told what was dropped to make room.
    """

    generator: TextGenerator
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    cache: CompressedCache | None = None
    turn_start: int = 0
    attempt: int = 0
    note: Callable[[str], None] = lambda line: None

    def ask(
        self,
        message: str,
        write: Callable[[str], None],
        stop: Callable[[], bool] | None = None,
        attempt: int = 0,
    ) -> GeneratedText:
        """Append a message and the generated answer; on an error, the conversation is unchanged, but for turns that
        were dropped to make room for the message.

        write, stop, attempt: as in `TextGenerator.generate`. An answer that is stopped is kept as far as it goes.
        """
        ids = self._with_room(message)
        self.generator.check_prompt(len(ids))  # refuses a prompt that is too long before the cache is changed
        cache, goes_on = self.cache, ids[: len(self.ids)] == self.ids
        if cache is None or not goes_on:
            cache = self.generator.attached.new_cache()
        self.cache = None  # an error leaves the cache inconsistent: keep it only when the answer is complete
        answer = self.generator.generate(ids, cache, write, stop, attempt, self._opening())
        self.turn_start = len(self.ids) if goes_on else 0
        self.messages = [*self._with(message), {"role": "assistant", "content": answer.text}]
        self.ids, self.cache = ids + answer.ids, cache
        if answer.dropped:  # the cache holds a part of the last turn; the next message drops turns before it
            self.load(self.messages)
        self.attempt = attempt
        return answer

    def ask_again(self, write: Callable[[str], None], stop: Callable[[], bool] | None = None) -> GeneratedText:
        """Replace the last answer by another one, from another seed; on an error, the conversation is unchanged."""
        if not self.messages:
            raise UsageError("there is no answer to replace")
        before = self.messages, self.ids, self.turn_start
        message = self.messages[-2]["content"]
        # The last turn's tokens are compressed together with earlier ones: the cache is computed again.
        self.messages, self.ids, self.cache = self.messages[:-2], self.ids[: self.turn_start], None
        try:
            return self.ask(message, write, stop, self.attempt + 1)
        except BaseException:
            (self.messages, self.ids, self.turn_start), self.cache = before, None
            raise

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self.load([])

    def load(self, messages: list[dict[str, str]]) -> None:
        """Continue from these turns; their cache is computed with the next message."""
        self.messages, self.ids, self.cache, self.turn_start, self.attempt = messages, [], None, 0, 0
        if self.has_template:
            return
        from kvq_cli.evaluation.chat_template import encode_prompt

        for message in messages:
            text = message["content"]
            if message["role"] == "user":
                self.turn_start, text = len(self.ids), reference_prompt(text)
            self.ids = self.ids + encode_prompt(self.generator.loaded.tokenizer, text, not self.ids)

    @property
    def has_template(self) -> bool:
        return getattr(self.generator.loaded.tokenizer, "chat_template", None) is not None

    def prompt_ids(self, message: str) -> list[int]:
        """Token ids of all turns and a new message, up to the beginning of its answer.

        Earlier answers keep the ids that were generated: decoding and encoding them again may give different ids.
        """
        from kvq_cli.evaluation.chat_template import chat_prompt, encode_prompt, system_message

        tokenizer = self.generator.loaded.tokenizer
        if not self.has_template:
            return self.ids + encode_prompt(tokenizer, reference_prompt(message), not self.ids)

        system = [] if self.system is None else [system_message(self.system)]
        text = chat_prompt(tokenizer, system + self._with(message))
        past = str(tokenizer.decode(self.ids))
        for known in (past, past.rstrip()):  # templates may strip an answer that was stopped behind a space
            if known and text.startswith(known):
                return self.ids + encode_prompt(tokenizer, text[len(known) :], special_tokens=False)
        return encode_prompt(tokenizer, text, special_tokens=False)

    def _with_room(self, message: str) -> list[int]:
        """`prompt_ids`. With `drop_oldest`, where they leave no room for an answer (of a quarter of the context at
        most), the oldest turns are dropped until they take half the context, and the others are read anew."""
        ids, turns = self.prompt_ids(message), len(self.messages)
        context, decoding = self.generator.loaded.context, self.generator.decoding
        if decoding.drop_oldest and len(ids) + min(decoding.max_new_tokens, context // 4) > context:
            while self.messages and len(ids) > context // 2:
                self.load(self.messages[2:])
                ids = self.prompt_ids(message)
        if dropped := (turns - len(self.messages)) // 2:
            of = f"{dropped} of {turns // 2} turns"
            self.note(f"the context is full: {of} were dropped, the oldest; the others are read anew")
        return ids

    def _opening(self) -> int:
        """Number of tokens before the first message, of which none is dropped."""
        from kvq_cli.evaluation.chat_template import chat_opening, system_message

        system = [] if self.system is None else [system_message(self.system)]
        drops = self.generator.decoding.drop_oldest
        return chat_opening(self.generator.loaded.tokenizer, system) if drops and self.has_template else 0

    def _with(self, message: str) -> list[dict[str, str]]:
        return [*self.messages, {"role": "user", "content": message}]


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

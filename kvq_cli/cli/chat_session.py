"""The loop of `kvq chat`: each message is answered or runs a command; errors and Ctrl-C do not end it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvq_cli.cli import chat_commands
from kvq_cli.cli.cache_lines import held_bytes
from kvq_cli.cli.conversation import Conversation
from kvq_cli.cli.failures import explain, one_line
from kvq_cli.cli.interrupts import Interrupts
from kvq_cli.cli.message_input import Message
from kvq_cli.cli.output import Output, human_bytes
from kvq_cli.cli.text_generator import check_utf8, write_stdout
from kvq_cli.errors import KvqError, is_out_of_memory

if TYPE_CHECKING:
    from kvq_cli.cli.text_generator import GeneratedText


@dataclass
class ChatSession:
    """A conversation with its output and its Ctrl-C."""

    conversation: Conversation
    out: Output
    interrupts: Interrupts

    def run(self, messages: Iterator[Message]) -> None:
        """Answer until the messages end, /exit is entered, or Ctrl-C is pressed twice in a row."""
        for message in messages:
            if message.is_command and message.text.strip() == "/exit":
                return
            try:
                if message.is_command:
                    chat_commands.run(self, message.text.strip())
                else:
                    self.say(message.text)
            except Exception as error:
                if not isinstance(error, KvqError) and not is_out_of_memory(error):
                    raise
                # Report it and go on with the next message.
                print(f"kvq: error: {one_line(explain(error)[0])}", file=sys.stderr)
            if self.interrupts.leaves:
                return

    def say(self, message: str) -> None:
        """Answer a message."""
        check_utf8(message, "the message")
        self.answer(lambda stop: self.conversation.ask(message, write_stdout, stop))

    def answer(self, generate: Callable[[Callable[[], bool]], GeneratedText]) -> GeneratedText | None:
        """Print an answer and its status line. `generate` takes `stop`, and writes the text.

        None if Ctrl-C came before the first token, or twice: then the conversation is as before.
        """
        try:
            with self.interrupts.answering() as stop:
                answer = generate(stop)
        except (KeyboardInterrupt, Exception):
            if not self.interrupts.count:
                raise
            # C extensions may turn KeyboardInterrupt into another error.
            if not self.interrupts.leaves:
                self.out.note("\nstopped; the message was not answered")
            return None
        write_stdout("\n")
        if answer.is_empty and not self.interrupts.count:
            self.out.note("the answer is empty: the model's first token was a stop token")
        for line in answer.notes(self.conversation.generator.loaded):
            self.out.note(line)
        self.out.note(self._status_line(answer))
        return answer

    def set_system(self, text: str) -> None:
        """Set the system message; UsageError where the model's chat template has none."""
        from kvq_cli.evaluation.chat_template import check_system

        check_utf8(text, "the system message")
        check_system(self.conversation.generator.loaded, text)
        self.conversation.system = text

    def _status_line(self, answer: GeneratedText) -> str:
        """`context 58 of 2,048 tokens; cache 120.0 KiB, 1.2 MiB at 16 bit; 21.3 tokens/s`"""
        used, context = answer.held_tokens, self.conversation.generator.loaded.context
        parts = ["stopped"] if self.interrupts.count else []
        parts.append(f"context {used:,} of {context:,} tokens")
        if answer.cache:
            parts.append(
                f"cache {human_bytes(held_bytes(answer.cache))}, {human_bytes(answer.cache['fp16_bytes'])} at 16 bit"
            )
        else:
            parts.append("cache not compressed")
        if answer.rate is not None:
            parts.append(f"{answer.rate:.1f} tokens/s")
        return f"[{'; '.join(parts)}]"

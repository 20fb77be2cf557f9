"""`kvq chat`: a conversation that keeps its compressed cache across turns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvq_cli.cli import options as opt
from kvq_cli.cli.conversation import Conversation
from kvq_cli.cli.generate import DecodingOptions
from kvq_cli.cli.option_groups import grouped
from kvq_cli.cli.output import Output
from kvq_cli.cli.text_generator import attached_generator, cache_line, check_utf8, write_stdout
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.files import write_json

HELP = """/help        show this list
/status      show the number of tokens and the size of the cache
/save FILE   write the conversation to FILE as JSON
/clear       start a new conversation
/exit        leave (as does the end of the input)
Everything else is a message. For a model without a chat template, such as the built-in one, a message that ends in a
question mark is a question about all earlier messages; any other message is text to continue."""


@grouped
def chat(
    decoding: DecodingOptions,
    compression: opt.CompressionOptions,
    model_options: opt.ModelOptions,
    prefill: opt.Prefill = "exact",
    config: opt.Config = None,
    quiet: opt.Quiet = False,
) -> None:
    """Chat with a model; its compressed cache is kept across turns. Type /help for the commands."""
    out = Output(quiet=quiet)
    parameters = decoding.decoding(model_options.seed)
    with attached_generator(model_options, compression, prefill, parameters) as generator:
        out.note(f"{generator.loaded.label} with {generator.method['name']}; /help lists the commands")
        Chat(Conversation(generator), out).run(_lines())


@dataclass
class Chat:
    """The input loop: each line is a command or a message."""

    conversation: Conversation
    out: Output

    def run(self, lines: Iterator[str]) -> None:
        for line in lines:
            if line.strip() == "/exit":
                return
            try:
                if line.lstrip().startswith("/"):
                    self.command(*line.strip().split(maxsplit=1))
                elif line.strip():
                    self.say(line)
            except UsageError as error:  # report it and go on with the next line
                print(f"kvq: error: {error}", file=sys.stderr)

    def say(self, message: str) -> None:
        check_utf8(message, "the message")
        answer = self.conversation.ask(message, write_stdout)
        write_stdout("\n")
        self.out.note(answer.summary())

    def command(self, name: str, argument: str = "") -> None:
        commands = {"/help": self.help, "/status": self.status, "/clear": self.clear}
        if name == "/save":
            self.save(argument)
        elif name not in commands or argument:
            line = f"{name} {argument}".strip()
            raise UsageError(f"unknown command {line!r}; valid: /help, /status, /save FILE, /clear and /exit")
        else:
            commands[name]()

    def help(self) -> None:
        self.out.text(HELP)

    def status(self) -> None:
        conversation = self.conversation
        turns, tokens, context = (
            len(conversation.messages) // 2,
            len(conversation.ids),
            conversation.generator.loaded.context,
        )
        self.out.text(f"{turns} turns, {tokens} tokens of a context of {context}")
        if conversation.cache is not None:
            self.out.text(cache_line(conversation.generator.attached.report(conversation.cache).to_dict()))

    def clear(self) -> None:
        self.conversation.clear()
        self.out.note("new conversation")

    def save(self, path: str) -> None:
        if not path:
            raise UsageError("/save needs a file name: /save talk.json")
        conversation = self.conversation
        document = {
            "model": conversation.generator.loaded.label,
            "method": conversation.generator.method,
            "messages": conversation.messages,
        }
        try:
            write_json(Path(path), document, "FILE")
        except KvqError as error:
            raise UsageError(f"/save: {error}") from error
        self.out.note(f"{len(conversation.messages)} messages written to {path}")


def _lines() -> Iterator[str]:
    """Input lines: typed at a prompt, or piped in."""
    if not sys.stdin.isatty():
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history for input())
    while True:
        try:
            yield input("> ")
        except EOFError:
            print(file=sys.stderr)
            return

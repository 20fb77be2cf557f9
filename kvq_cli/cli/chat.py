"""`kvq chat`: a conversation that keeps its compressed cache from turn to turn."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvq_cli.cli import options as opt
from kvq_cli.cli.conversation import Conversation
from kvq_cli.cli.generate import Sampling
from kvq_cli.cli.option_groups import grouped
from kvq_cli.cli.output import Output
from kvq_cli.cli.text_generator import answering, cache_line, check_text, to_stdout
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.files import write_json

HELP = """/help        what can be typed
/status      tokens and cache bytes so far
/save FILE   write the conversation to FILE as JSON
/clear       forget the conversation
/exit        leave (so does the end of the input)
Anything else is a message. On a model without a chat template, such as the built-in one, a message that ends in a
question mark is a question about all that was said before it; any other is text to go on with."""


@grouped
def chat(
    sampling: Sampling,
    compression: opt.Compression,
    computing: opt.Computing,
    prefill: opt.Prefill = "exact",
    config: opt.Config = None,
    quiet: opt.Quiet = False,
) -> None:
    """Talk with a model; its compressed cache is kept across turns. Type /help inside."""
    out = Output(quiet=quiet)
    with answering(computing, compression, prefill, sampling.decoding(computing.seed)) as answerer:
        out.note(f"{answerer.loaded.name} with {answerer.method['name']}; /help lists what can be typed")
        Chat(Conversation(answerer), out).run(_lines())


@dataclass
class Chat:
    """The loop: a line is a command or a message."""

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
            except UsageError as error:  # a mistake that the next line can mend
                print(f"kvq: error: {error}", file=sys.stderr)

    def say(self, message: str) -> None:
        check_text(message, "the message")
        answer = self.conversation.ask(message, to_stdout)
        to_stdout("\n")
        self.out.note(answer.summary())

    def command(self, name: str, argument: str = "") -> None:
        commands = {"/help": self.help, "/status": self.status, "/clear": self.clear}
        if name == "/save":
            self.save(argument)
        elif name not in commands or argument:
            line = f"{name} {argument}".strip()
            raise UsageError(f"unknown command {line!r}; there are /help, /status, /save FILE, /clear and /exit")
        else:
            commands[name]()

    def help(self) -> None:
        self.out.text(HELP)

    def status(self) -> None:
        talk = self.conversation
        turns, tokens, context = len(talk.messages) // 2, len(talk.ids), talk.answerer.loaded.context
        self.out.text(f"{turns} turns, {tokens} tokens of a context of {context}")
        if talk.cache is not None:
            self.out.text(cache_line(talk.answerer.attached.report(talk.cache).to_dict()))

    def clear(self) -> None:
        self.conversation.clear()
        self.out.note("the conversation is forgotten")

    def save(self, path: str) -> None:
        if not path:
            raise UsageError("/save needs a file name: /save talk.json")
        talk = self.conversation
        document = {"model": talk.answerer.loaded.name, "method": talk.answerer.method, "messages": talk.messages}
        try:
            write_json(Path(path), document, "FILE")
        except KvqError as error:
            raise UsageError(f"/save: {error}") from error
        self.out.note(f"{len(talk.messages)} messages written to {path}")


def _lines() -> Iterator[str]:
    """Lines typed by a person, with a prompt, or piped in."""
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

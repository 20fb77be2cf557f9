"""The commands of `kvq chat`, each with its help."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq_cli.cli.cache_lines import cache_line, longer_text
from kvq_cli.cli.failures import escaped
from kvq_cli.cli.text_generator import check_utf8, write_stdout
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.files import MAX_TEXT, load_json, read_text, write_json

if TYPE_CHECKING:
    from kvq_cli.cli.chat_session import ChatSession
    from kvq_cli.cli.text_generator import GeneratedText


@dataclass(frozen=True)
class Command:
    """argument: its name in the help, in brackets where it may be left out; empty for none. example: of an argument."""

    name: str
    argument: str
    help: str
    run: Callable[[ChatSession, str], None]
    example: str = ""


def run(chat: ChatSession, line: str) -> None:
    """Run the command in `line`; UsageError for an unknown one, and for a wrong argument."""
    name, _, argument = line.partition(" ")
    name, *more = name.split("\n", 1)  # of an entry of several lines
    argument = "\n".join([*more, argument]).strip()
    command = next((command for command in COMMANDS if command.name == name), None)
    if command is None or (argument and not command.argument):
        valid = ", ".join(f"{command.name} {command.argument}".strip() for command in COMMANDS)
        raise UsageError(f"unknown command {line!r}; valid: {valid} and /exit")
    if command.example and not argument:
        raise UsageError(f"{name} needs {command.argument}: {name} {command.example}")
    command.run(chat, argument)


def show_help(chat: ChatSession, _argument: str) -> None:
    rows = [(f"{command.name} {command.argument}", command.help) for command in COMMANDS]
    rows.append(("/exit", "quit; also Ctrl-D, or Ctrl-C twice"))
    chat.out.text("\n".join(f"{name:<20} {text}" for name, text in rows))
    chat.out.prose(NOTES)


def status(chat: ChatSession, _argument: str) -> None:
    conversation = chat.conversation
    tokens, context = len(conversation.ids), conversation.generator.loaded.context
    chat.out.text(f"{len(conversation.messages) // 2} turns, {tokens:,} tokens of a context of {context:,}")
    if conversation.system is not None:
        chat.out.text(f"system message: {conversation.system}")
    if conversation.cache is not None:
        generator = conversation.generator
        report = generator.attached.report(conversation.cache).to_dict()
        chat.out.text(cache_line(report, longer_text(report, generator.attached.method, generator.loaded)))


def clear(chat: ChatSession, _argument: str) -> None:
    chat.conversation.clear()
    chat.out.note("new conversation")


def regenerate(chat: ChatSession, _argument: str) -> None:
    if chat.conversation.generator.decoding.temperature == 0 and chat.conversation.messages:
        chat.out.note("decoding is greedy, so that answers repeat; --temperature 0.7 varies them")
    chat.answer(lambda stop: chat.conversation.ask_again(write_stdout, stop))


def system(chat: ChatSession, text: str) -> None:
    if text:
        chat.set_system(text)
    else:
        chat.conversation.system = None
    chat.out.note(f"system message {'set' if text else 'removed'}; the next message computes the cache again")


def compare(chat: ChatSession, question: str) -> None:
    """Answer a question with and without compression, from equal prompts; the conversation is not changed."""
    generator = chat.conversation.generator
    if generator.attached.method.nominal_bits == 16:
        raise UsageError("/compare: this conversation has no compression; start it with another --method")
    check_utf8(question, "the question")
    ids = chat.conversation.prompt_ids(question)
    generator.check_prompt(len(ids))
    answers: list[GeneratedText] = []
    for name, cache in (
        (generator.attached.method.name, generator.attached.new_cache()),
        ("without compression", None),
    ):
        write_stdout(f"{name}:\n")
        answer = chat.answer(partial(generator.generate, ids, cache, write_stdout))
        if answer is None or chat.interrupts.count:
            return
        answers.append(answer)
    chat.out.note(_agreement(answers[0].ids, answers[1].ids))


def _agreement(one: list[int], other: list[int]) -> str:
    if one == other:
        return f"the same {len(one)} tokens"
    same = next((i for i, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))  # noqa: B905
    return f"the answers agree in their first {same} tokens"


def save(chat: ChatSession, path: str) -> None:
    conversation = chat.conversation
    system = [] if conversation.system is None else [{"role": "system", "content": conversation.system}]
    document = {
        "model": conversation.generator.loaded.label,
        "method": conversation.generator.method,
        "messages": system + conversation.messages,
    }
    if not _path(path).parent.is_dir():
        raise UsageError(f"/save {path}: no folder {_path(path).parent}; make it first, or choose another FILE")
    try:
        write_json(_path(path), document, "FILE")
    except (KvqError, ValueError) as error:  # ValueError: a null byte in the name
        raise UsageError(f"/save: {error}") from error
    chat.out.note(f"{len(conversation.messages)} messages written to {path}")


def load(chat: ChatSession, path: str) -> None:
    document = _read(path)
    messages = document["messages"]
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    if system is not None:
        chat.set_system(system)
    chat.conversation.system = system
    chat.conversation.load(messages[system is not None :])
    chat.out.note(f"{len(chat.conversation.messages)} messages read from {path}; the next one computes their cache")
    model = chat.conversation.generator.loaded.label
    if document.get("model") != model:
        chat.out.note(f"they were saved with the model {escaped(str(document.get('model')))}, not {model}")


def _path(typed: str) -> Path:
    """The path, `~` being the home folder: no shell has replaced it."""
    return Path(os.path.expanduser(typed))


def _read(path: str) -> dict[str, Any]:
    """The contents of a file written by /save; UsageError for anything else."""
    file = _path(path)
    try:
        document = load_json(read_text(file, MAX_TEXT))
    except OSError as error:
        raise UsageError(f"/load {path}: {error.strerror}") from None
    except ValueError:
        raise UsageError(f"/load {path}: not JSON") from None
    messages = document.get("messages") if isinstance(document, dict) else None
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise UsageError(f"/load {path}: not a conversation written by /save")
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[:1] == ["system"] else roles
    if turns != ["user", "assistant"] * (len(turns) // 2):
        raise UsageError(f"/load {path}: the messages are not of a user and an assistant in turns")
    return document


def _is_message(message: Any) -> bool:
    if not isinstance(message, dict) or not isinstance(message.get("content"), str):
        return False
    check_utf8(message["content"], "a message of the file")
    return isinstance(message.get("role"), str)


COMMANDS = (
    Command("/help", "", "show this list", show_help),
    Command("/status", "", "show the number of tokens, the system message and the size of the cache", status),
    Command("/regenerate", "", "replace the last answer by another one", regenerate),
    Command(
        "/compare", "QUESTION", "answer with and without compression; not added to the conversation", compare, "Why?"
    ),
    Command("/system", "[TEXT]", "set the system message: how to answer; without TEXT: remove it", system),
    Command("/save", "FILE", "write the conversation to FILE as JSON", save, "talk.json"),
    Command("/load", "FILE", "continue the conversation in FILE", load, "talk.json"),
    Command("/clear", "", "start a new conversation; the system message stays", clear),
)
NOTES = '''\
Everything else is a message. A line that ends in a backslash goes on in the next one; """ begins and ends a
message of several lines; pasted lines are one message. Ctrl-C stops an answer and keeps its text so far.
For a model without a chat template, such as the built-in one, a message that ends in a question mark is a
question about all earlier messages; any other message is text to continue.'''

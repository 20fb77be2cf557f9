"""`kvq chat` with piped input: commands, cache reuse across turns, prompt formats."""

import io
import json
import os
import re
import signal
import stat
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from kvq_cli.cli.chat_session import ChatSession
from kvq_cli.cli.conversation import Conversation, reference_prompt
from kvq_cli.cli.interrupts import Interrupts
from kvq_cli.cli.line_history import LineHistory
from kvq_cli.cli.message_input import Message, messages
from kvq_cli.cli.options import CompressionOptions, ModelOptions
from kvq_cli.cli.output import Output
from kvq_cli.cli.text_generator import Decoding, attached_generator
from kvq_cli.errors import KvqError, UsageError

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
STORY = " The river flows through the old town. " * 30


@pytest.fixture
def at_terminal(monkeypatch, request):
    """Handle Ctrl-C as for a person at a terminal."""
    request.getfixturevalue("default_sigint")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)


def ignore(piece: str) -> None:
    """What an answer is written to."""


def answer_of(stdout: str) -> str:
    """The first answer, which `/status` follows."""
    return stdout[: stdout.index("\n1 turns")]


def common_prefix(one: str, other: str) -> str:
    return os.path.commonprefix([one, other])


@pytest.fixture
def chat(kvq):
    def run(*lines: str, arguments=("-n", 6)):
        return kvq("chat", *arguments, input="".join(line + "\n" for line in lines))

    return run


def test_commands(chat, tmp_path):
    result = chat(
        "/help", "/status", "The town", "/status", "/save talk.json", "/clear", "/status", "/exit", "never read"
    )
    assert result.exit_code == 0, result.stderr
    assert "/save FILE" in result.stdout and "1 turns" in result.stdout and result.stdout.count("0 turns") == 2
    assert re.search(r"\[context \d+ of 4,096 tokens; cache .+B, .+B at 16 bit; [\d.]+ tokens/s\]", result.stderr)
    assert "The built-in model is a toy" in result.stderr and "--model smollm2" in result.stderr
    assert "method: kivi, 2 bits (default: no 2-bit artifact in artifacts/reference)" in result.stderr
    help_lines = result.stdout[: result.stdout.index("0 turns")].splitlines()
    assert len(help_lines) > 9 and max(len(line) for line in help_lines) <= 110
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [m["role"] for m in saved["messages"]] == ["user", "assistant"]
    assert saved["messages"][0]["content"] == "The town" and saved["method"]["name"] == "kivi"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/nonsense", "unknown command '/nonsense'; valid: /help"),
        ("  /nonsense", "unknown command '/nonsense'; valid: /help"),
        ("/status now", "unknown command '/status now'"),
        ("/save", "/save needs FILE: /save talk.json"),
        ("/load gone.json", "/load gone.json: No such file"),
        ("/load .", "/load .: Is a directory"),
        ("/regenerate", "there is no answer to replace"),
        ("/system Be brief.", "the tokenizer of reference has no chat template"),
        ("/compare", "/compare needs QUESTION"),
        ("/save /dev/null/x", "/save /dev/null/x: no folder /dev/null; make it first, or choose another FILE"),
        ("/save new/talk.json", "/save new/talk.json: no folder new; make it first"),
        ("/save /proc/x", "/save: cannot write /proc/x: "),
        ("/save .", "/save: . is a folder; give the name of a file"),
        ("/save a\0b", "/save: embedded null byte"),
        ("/load a\0b", "/load a\\x00b: not JSON"),
        ("/load /dev/zero", "/load /dev/zero: Not a regular file"),
        ("word " * 5000, "the prompt has"),
    ],
)
def test_errors_do_not_end_the_conversation(chat, line, says):
    result = chat(line, "/status")
    assert result.exit_code == 0
    assert says in result.stderr and "0 turns" in result.stdout


def test_tilde_is_the_home_folder(chat, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    result = chat("/save ~/talk.json", "/load ~/talk.json", "/save ~nobody-of-this-name/x")
    assert result.exit_code == 0 and "0 messages read from ~/talk.json" in result.stderr
    assert (tmp_path / "home" / "talk.json").is_file() and not (tmp_path / "~").exists()


@pytest.mark.parametrize("error", [KvqError("layer 0: the keys contain NaN"), torch.OutOfMemoryError("no memory")])
def test_failures_do_not_end_the_conversation(capsys, error):
    class Failing:
        generator = SimpleNamespace(loaded=SimpleNamespace(context=100))
        said: ClassVar = []

        def ask(self, message, write, stop):
            self.said.append(message)
            raise error

    session = ChatSession(Failing(), Output(), Interrupts())
    session.run(iter([Message("one", False), Message("two", False)]))
    assert Failing.said == ["one", "two"]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("NaN" in line or "out of memory" in line for line in lines)


def test_a_defect_still_ends_the_conversation():
    class Defective:
        def ask(self, message, write, stop):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        ChatSession(Defective(), Output(), Interrupts()).run(iter([Message("one", False)]))


def test_loaded_files_do_not_write_to_the_terminal(tmp_path, capsys):
    """The model's name and the system message of a file, which may come from anyone."""
    said = []
    conversation = SimpleNamespace(
        messages=[], ids=[], cache=None, system=None, load=said.append,
        generator=SimpleNamespace(loaded=SimpleNamespace(label="mine", context=100)),
    )  # fmt: skip
    session = ChatSession(conversation, Output(), Interrupts())
    session.set_system = lambda text: None
    document = {"model": "\x1b]0;title\x07", "messages": [{"role": "system", "content": "one\n\x1b[2J\x9b2J"}]}
    (tmp_path / "talk.json").write_text(json.dumps(document))
    session.run(iter([Message(f"/load {tmp_path / 'talk.json'}", True), Message("/status", True)]))
    out, err = capsys.readouterr()
    assert "\\x1b]0;title\\x07, not mine" in err and "system message: one\n\\x1b[2J\\x9b2J" in out
    assert "\x1b" not in out + err and said == [[]]


def test_a_file_that_is_too_large_to_be_a_conversation_is_not_read(chat, tmp_path):
    with open(tmp_path / "talk.json", "w") as file:
        file.truncate(1 << 40)  # sparse: takes no space
    assert "/load talk.json: has 1,099,511,627,776 bytes, above" in chat("/load talk.json").stderr


def test_binary_message_is_reported_and_sigterm_is_an_interrupt(kvq_process):
    process = kvq_process("chat", "--method", "fp16")
    assert any("/help" in line for line in process.stderr)
    process.stdin.buffer.write(b"\xff\xfe\n/status\n/nonsense\n")
    process.stdin.flush()
    assert process.stderr.readline().startswith("kvq: error: the message is not UTF-8 text")
    assert "unknown command" in process.stderr.readline()  # it waits for its input now
    process.terminate()
    stdout, stderr = process.communicate(timeout=60)
    assert "0 turns" in stdout
    assert (process.returncode, stderr.strip()) == (130, "kvq: interrupted")


def test_a_byte_order_mark_is_not_part_of_the_first_message(chat):
    assert chat("\ufeff/status").stdout.startswith("0 turns")


def test_end_of_input_ends_the_chat(chat):
    assert chat().exit_code == 0
    assert chat("", "  ").stdout == ""


@pytest.mark.parametrize(
    ("method", "tokens"), [("fp16", None), ("fp16", 3), ("kivi", None), ("kivi", 3)], ids=lambda value: str(value)
)
def test_second_turn_reuses_the_cache_of_the_first(method, tokens):
    """With an uncompressed cache both turns say what one pass over all tokens says; only new tokens are computed.

    tokens: after which the first answer is stopped.
    """
    count = iter(range(1, 100))
    with attached_generator(
        ModelOptions(dtype="float32"), CompressionOptions(method), "exact", Decoding(8)
    ) as generator:
        conversation = Conversation(generator)
        first = conversation.ask(STORY, ignore, lambda: next(count) == tokens)
        assert len(first.ids) == (tokens or 8) and conversation.messages[-1]["content"] == first.text
        held, cache = list(conversation.ids), conversation.cache
        second = conversation.ask("Where does the river flow?", ignore)
        assert conversation.cache is cache and conversation.ids[: len(held)] == held
        assert second.cache["tokens"] == len(conversation.ids) - 1
        if method == "fp16":
            prompt = conversation.ids[: len(conversation.ids) - len(second.ids)]
            again = generator.generate(prompt, generator.attached.new_cache(), ignore)
            assert again.ids == second.ids


def test_failed_turn_leaves_the_conversation_unchanged():
    with attached_generator(ModelOptions(), CompressionOptions("kivi"), "exact", Decoding(4)) as generator:
        conversation = Conversation(generator)
        conversation.ask("The town", ignore)
        before = (list(conversation.messages), list(conversation.ids))

        def broken(piece: str) -> None:
            raise OSError("pipe closed")

        with pytest.raises(OSError, match="pipe closed"):
            conversation.ask("and then", broken)
        assert (conversation.messages, conversation.ids) == before
        assert conversation.ask("and then", ignore).cache["tokens"] == len(conversation.ids) - 1


def test_chat_template_is_applied_and_the_cache_reused():
    """A template that shows history unchanged lets the second turn go on with the first one's cache."""
    with attached_generator(ModelOptions(), CompressionOptions("fp16"), "exact", Decoding(5)) as generator:
        generator.loaded.tokenizer.chat_template = TEMPLATE
        conversation = Conversation(generator)
        conversation.ask("hello", ignore)
        decode = generator.loaded.tokenizer.decode
        assert decode(conversation.ids).startswith("[user]hello[assistant]")
        cache = conversation.cache
        conversation.ask("more", ignore)
        assert "[user]more[assistant]" in decode(conversation.ids)
        assert conversation.cache is cache


def test_regenerate_replaces_the_last_answer():
    """Greedy decoding gives the same answer again; sampling another one."""
    options = ModelOptions(dtype="float32"), CompressionOptions("fp16"), "exact"
    with attached_generator(*options, Decoding(6)) as generator:
        conversation = Conversation(generator)
        conversation.ask(STORY, ignore)
        second = conversation.ask("The town", ignore)
        before = (list(conversation.messages), list(conversation.ids))
        assert conversation.ask_again(ignore).ids == second.ids
        assert (conversation.messages, conversation.ids) == before
        assert conversation.cache.get_seq_length() == len(conversation.ids) - 1
        generator.decoding = Decoding(6, temperature=2.0)
        sampled = [conversation.ask_again(ignore).ids for _ in range(2)]
        assert sampled[0] != sampled[1] and len(conversation.messages) == 4

        def broken(piece: str) -> None:
            raise OSError("pipe closed")

        before = (list(conversation.messages), list(conversation.ids))
        with pytest.raises(OSError, match="pipe closed"):
            conversation.ask_again(broken)
        assert (conversation.messages, conversation.ids) == before


def test_compare_answers_as_generate_does_and_changes_nothing(chat, kvq):
    exact = ["-n", 12, "--dtype", "float32", "--seed", 3]
    kivi = ["--method", "kivi", "--bits", 1, "--set", "residual=32", "--set", "group=32"]
    result = chat("The town", "/status", f"/compare {STORY}", "/status", arguments=[*exact, *kivi])
    question = [reference_prompt("The town") + answer_of(result.stdout) + reference_prompt(STORY), *exact]
    wanted = [kvq("generate", *question, *method).stdout for method in (kivi, ["--method", "fp16"])]
    assert wanted[0] != wanted[1]
    compared = result.stdout[result.stdout.index("kivi:") :]
    assert compared.startswith(f"kivi:\n{wanted[0]}without compression:\n{wanted[1]}1 turns")
    assert result.stdout.count("1 turns, ") == 2
    same = len(common_prefix(*wanted))
    assert re.search(r"agree in their first \d+ tokens", result.stderr) and same < len(wanted[0])
    assert "no compression" in chat("/compare Why?", arguments=["--method", "fp16"]).stderr


def test_loaded_conversation_goes_on_as_if_never_left(chat):
    exact = ["-n", 6, "--dtype", "float32", "--method", "fp16"]
    plain = chat("The town", "and then", arguments=exact).stdout
    loaded = chat("The town", "/save a.json", "/clear", "/load a.json", "and then", arguments=exact)
    assert loaded.stdout == plain and "2 messages read from a.json" in loaded.stderr


def test_ctrl_c_leaves_the_cache_as_if_it_had_not_come(at_terminal, capsys):
    """After the first token, what was said is kept; in the middle of a forward pass, the message is taken back."""
    with attached_generator(ModelOptions(), CompressionOptions("kivi"), "exact", Decoding(5)) as generator:
        conversation, interrupts = Conversation(generator), Interrupts()
        chat = ChatSession(conversation, Output(), interrupts)

        def press(*_: object) -> None:
            signal.raise_signal(signal.SIGINT)

        pieces: list[str] = []

        def press_at_second(piece: str) -> None:
            pieces.append(piece)
            if len(pieces) == 2:
                press()

        with interrupts.installed():
            stopped = chat.answer(lambda stop: conversation.ask(STORY, press_at_second, stop))
            assert 1 < len(stopped.ids) < 5 and conversation.cache.get_seq_length() == len(conversation.ids) - 1
            interrupts.count = 0  # a line was entered
            before = (list(conversation.messages), list(conversation.ids))
            with generator.loaded.model.model.layers[3].register_forward_pre_hook(press):
                assert chat.answer(lambda stop: conversation.ask("and then", ignore, stop)) is None
            assert (conversation.messages, conversation.ids) == before and not interrupts.leaves
            interrupts.count = 0
            after = chat.answer(lambda stop: conversation.ask("and then", ignore, stop))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # up to the end of the program
        prompt = conversation.ids[: -len(after.ids)]
        assert after.ids == generator.generate(prompt, generator.attached.new_cache(), ignore).ids
    assert "[stopped; context" in (err := capsys.readouterr().err) and "the message was not answered" in err


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("nonsense", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "not a conversation"),
        ('{"messages": [{"role": "user"}]}', "not a conversation"),
        ('{"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]}', "in turns"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "in turns"),
        ('{"messages": [{"role": "system", "content": "x"}]}', "no chat template"),
        ('{"messages": [{"role": "user", "content": "\\udcff"}]}', "not UTF-8"),
    ],
)
def test_other_files_are_not_loaded(chat, tmp_path, content, says):
    (tmp_path / "talk.json").write_text(content)
    result = chat("/load talk.json", "/status")
    assert says in result.stderr and "0 turns" in result.stdout


def test_system_message_begins_the_prompt_and_drops_the_cache():
    with attached_generator(ModelOptions(), CompressionOptions("fp16"), "exact", Decoding(3)) as generator:
        tokenizer = generator.loaded.tokenizer
        tokenizer.chat_template = TEMPLATE
        conversation = Conversation(generator)
        chat = ChatSession(conversation, Output(), Interrupts())
        conversation.ask("hello", ignore)
        cache, answer = conversation.cache, conversation.messages[-1]["content"]
        chat.set_system("Be brief.")
        again = conversation.ask("more", ignore)
        assert conversation.cache is not cache and again.cache["tokens"] == len(conversation.ids) - 1
        text = f"[system]Be brief.[user]hello[assistant]{answer}[user]more[assistant]"
        assert tokenizer.decode(conversation.ids).startswith(text)
        tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
        with pytest.raises(UsageError, match="has no place for a system message"):
            chat.set_system("Be brief.")
        tokenizer.chat_template = "{{ raise_exception('no system role') }}"
        with pytest.raises(UsageError, match="has no place for a system message"):
            chat.set_system("Be brief.")


def test_stopped_answer_is_kept_by_a_template_that_strips():
    """The cache is reused although the template writes the answer without its last space."""
    with attached_generator(ModelOptions(), CompressionOptions("fp16"), "exact", Decoding(3)) as generator:
        tokenizer = generator.loaded.tokenizer
        tokenizer.chat_template = TEMPLATE.replace("m.content", "m.content | trim")
        conversation = Conversation(generator)
        conversation.ask("hello", ignore)
        conversation.ids[-1:] = tokenizer(" town\n", add_special_tokens=False)["input_ids"]
        answer = tokenizer.decode(conversation.ids).removeprefix("[user]hello[assistant]")
        conversation.messages[-1]["content"] = answer
        ids = conversation.prompt_ids("more")
        assert answer.endswith("\n") and ids[: len(conversation.ids)] == conversation.ids
        assert tokenizer.decode(ids[len(conversation.ids) :]) == "[user]more[assistant]"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["one"], Message("one", False)),
        (["/status "], Message("/status ", True)),
        (["one \\", "two\\", "three"], Message("one \ntwo\nthree", False)),
        (["one\\"], Message("one", False)),  # cut by the end of the input
        (['"""', "/one", "", "two\\", '"""'], Message("/one\n\ntwo\\", False)),
        (['"""one"""'], Message("one", False)),
        ([' """one', 'two """'], Message("one\ntwo ", False)),
    ],
)
def test_messages_of_several_lines(monkeypatch, lines, message):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines)))
    assert list(messages(Interrupts(), ignore)) == [message]


def test_history_is_short_and_private(tmp_path):
    history = LineHistory(tmp_path / "kvq" / "history")
    assert history.load_history_strings() == []
    for message in ["", "x" * 5000, *map(str, range(1200)), "two\nlines"]:
        history.store_string(message)
    assert history.load_history_strings() == ["two\nlines", *(str(number) for number in range(1199, 200, -1))]
    assert history.path.stat().st_size < 6000 and stat.S_IMODE(history.path.stat().st_mode) == 0o600
    assert list(history.path.parent.iterdir()) == [history.path]
    LineHistory(tmp_path / "kvq" / "history" / "x").store_string("no folder: no error")


@pytest.mark.parametrize(
    ("message", "form"),
    [
        ("The town", " The town"),
        ("What is it?", "\nQuestion: What is it?\nAnswer:"),
        ("A is 5. B is 6. What is A?", " A is 5. B is 6.\nQuestion: What is A?\nAnswer:"),
        ("A is 5\nWhat is A? ", " A is 5\nQuestion: What is A?\nAnswer:"),
    ],
)
def test_reference_prompt(message, form):
    assert reference_prompt(message) == form

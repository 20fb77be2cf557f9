"""`kvq chat` with piped input: commands, cache reuse across turns, prompt formats."""

import json

import pytest

from kvq_cli.cli.conversation import Conversation, reference_prompt
from kvq_cli.cli.options import CompressionOptions, ModelOptions
from kvq_cli.cli.text_generator import Decoding, attached_generator

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
STORY = " The river flows through the old town. " * 30


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
    assert "tokens/s" in result.stderr and "in 16 bit" in result.stderr
    saved = json.loads((tmp_path / "talk.json").read_text())
    assert [m["role"] for m in saved["messages"]] == ["user", "assistant"]
    assert saved["messages"][0]["content"] == "The town" and saved["method"]["name"] == "kivi"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("/nonsense", "unknown command '/nonsense'; valid: /help"),
        ("  /nonsense", "unknown command '/nonsense'; valid: /help"),
        ("/status now", "unknown command '/status now'"),
        ("/save", "/save needs a file name"),
        ("/save /dev/null/x", "cannot write /dev/null/x: File exists; choose another FILE"),
        ("word " * 5000, "the prompt has"),
    ],
)
def test_errors_do_not_end_the_conversation(chat, line, says):
    result = chat(line, "/status")
    assert result.exit_code == 0
    assert says in result.stderr and "0 turns" in result.stdout


def test_binary_message_is_reported_and_sigterm_is_an_interrupt(kvq_process):
    process = kvq_process("chat", "--method", "fp16")
    assert "/help" in process.stderr.readline()
    process.stdin.buffer.write(b"\xff\xfe\n/status\n/nonsense\n")
    process.stdin.flush()
    assert process.stderr.readline().startswith("kvq: error: the message is not UTF-8 text")
    assert "unknown command" in process.stderr.readline()  # it waits for its input now
    process.terminate()
    stdout, stderr = process.communicate(timeout=60)
    assert "0 turns" in stdout
    assert (process.returncode, stderr.strip()) == (130, "kvq: interrupted")


def test_end_of_input_ends_the_chat(chat):
    assert chat().exit_code == 0
    assert chat("", "  ").stdout == ""


@pytest.mark.parametrize("method", ["fp16", "kivi"])
def test_second_turn_reuses_the_cache_of_the_first(method):
    """With an uncompressed cache both turns say what one pass over all tokens says; only new tokens are computed."""
    with attached_generator(
        ModelOptions(dtype="float32"), CompressionOptions(method), "exact", Decoding(8)
    ) as generator:
        conversation = Conversation(generator)
        conversation.ask(STORY, lambda piece: None)
        held, cache = list(conversation.ids), conversation.cache
        second = conversation.ask("Where does the river flow?", lambda piece: None)
        assert conversation.cache is cache and conversation.ids[: len(held)] == held
        assert second.cache["tokens"] == len(conversation.ids) - 1
        if method == "fp16":
            prompt = conversation.ids[: len(conversation.ids) - len(second.ids)]
            again = generator.generate(prompt, generator.attached.new_cache(), lambda piece: None)
            assert again.ids == second.ids


def test_failed_turn_leaves_the_conversation_unchanged():
    with attached_generator(ModelOptions(), CompressionOptions("kivi"), "exact", Decoding(4)) as generator:
        conversation = Conversation(generator)
        conversation.ask("The town", lambda piece: None)
        before = (list(conversation.messages), list(conversation.ids))

        def broken(piece: str) -> None:
            raise OSError("pipe closed")

        with pytest.raises(OSError, match="pipe closed"):
            conversation.ask("and then", broken)
        assert (conversation.messages, conversation.ids) == before
        assert conversation.ask("and then", lambda piece: None).cache["tokens"] == len(conversation.ids) - 1


def test_chat_template_is_applied_and_the_cache_reused():
    """A template that shows history unchanged lets the second turn go on with the first one's cache."""
    with attached_generator(ModelOptions(), CompressionOptions("fp16"), "exact", Decoding(5)) as generator:
        generator.loaded.tokenizer.chat_template = TEMPLATE
        conversation = Conversation(generator)
        conversation.ask("hello", lambda piece: None)
        decode = generator.loaded.tokenizer.decode
        assert decode(conversation.ids).startswith("[user]hello[assistant]")
        cache = conversation.cache
        conversation.ask("more", lambda piece: None)
        assert "[user]more[assistant]" in decode(conversation.ids)
        assert conversation.cache is cache


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

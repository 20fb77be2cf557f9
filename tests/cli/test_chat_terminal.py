"""`kvq chat` typed at a pseudo-terminal: Ctrl-C, Ctrl-D, several lines, history across runs."""

import os
import re
import stat

import pytest
from terminal import CTRL_C, CTRL_D, HOME, PROMPT, RIGHT, UP, Terminal

from kvq_cli.cli.line_history import LINE_BREAK

FAKE = "from fake_chat import main; main()"


@pytest.fixture
def chat(tmp_path, monkeypatch):
    """Starts a chat with a model that needs no time to load."""
    support = os.path.join(os.path.dirname(__file__), "..", "support")
    monkeypatch.setenv("PYTHONPATH", support, prepend=os.pathsep)

    def start(before: str = "") -> Terminal:
        terminal = Terminal(before + FAKE, tmp_path, XDG_STATE_HOME=str(tmp_path / "state"))
        terminal.expect(PROMPT)
        return terminal

    return start


def test_ctrl_c_stops_the_answer_and_keeps_the_session(chat):
    with chat() as terminal:
        terminal.type("first\r")
        terminal.expect("word 2")
        terminal.type(CTRL_C)
        terminal.expect("[stopped; context ")
        words = len(re.findall(r"word \d", terminal.text))
        assert 2 <= words < 600
        terminal.expect(PROMPT)
        terminal.type("short\r")
        terminal.expect(
            "<short> word 1 word 2 word 3\r\n[context 4 of 100 tokens; cache 1 B, 8 B at 16 bit; 2.0 tokens/s]"
        )
        terminal.expect(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0


@pytest.mark.parametrize("when", ["answering", "prefill", "typing"])
def test_ctrl_c_twice_leaves_with_0(chat, when):
    with chat() as terminal:
        terminal.type({"answering": "first\r", "prefill": "prefill\r", "typing": "half a line"}[when])
        terminal.expect({"answering": "word 1", "prefill": "<prefill>", "typing": "half a line"}[when])
        terminal.type(CTRL_C + CTRL_C)
        assert terminal.interrupt_until_end() == 0
        assert "Traceback" not in terminal.text and "left" in terminal.text


def test_ctrl_c_before_the_first_token_withdraws_the_message(chat):
    with chat() as terminal:
        terminal.type("prefill\r")
        terminal.expect("<prefill>")
        terminal.type(CTRL_C)
        terminal.expect("stopped; the message was not answered")
        terminal.expect(PROMPT)
        terminal.type("short\r")
        terminal.expect("<short> word 1 word 2 word 3\r\n[context")


def test_several_lines_and_history_across_runs(chat, tmp_path):
    with chat() as terminal:
        terminal.type("short \\\rand more\r")
        terminal.expect("<short \r\nand more>")
        terminal.expect(PROMPT)
        terminal.type('"""short\r\r/exit is text here"""\r')
        terminal.expect("<short\r\n\r\n/exit is text here>")
        terminal.expect(PROMPT)
        terminal.type("/exit\r")
        assert terminal.exit_code() == 0
    history = tmp_path / "state" / "kvq" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    kept = ["short \nand more", '"""short\n\n/exit is text here"""', "/exit"]
    assert history.read_text().splitlines() == [message.replace("\n", LINE_BREAK) for message in kept]
    with chat() as terminal:
        terminal.type(UP * 5 + "\r")  # /exit, and the three lines of the message before it
        terminal.expect("<short \r\nand more>")


def test_pasted_lines_are_one_message_and_lines_can_be_corrected(chat):
    with chat() as terminal:
        terminal.type("\x1b[200~short \\\rand\r\x1b[201~more\r")
        terminal.expect("<short \\\r\nand\r\nmore>")
        terminal.expect(PROMPT)
        terminal.type('"""hort\rmore"""' + UP + HOME + RIGHT * 3 + "s" + "\r")
        terminal.expect("<short\r\nmore>")
        terminal.expect(PROMPT)
        terminal.type("short \\\rlost" + CTRL_C)
        terminal.expect("Ctrl-C again or Ctrl-D quits")
        terminal.expect(PROMPT)
        terminal.type("short\r")
        terminal.expect("<short>")


def test_the_prompt_is_on_the_terminal_where_answers_go_to_a_file(chat, tmp_path):
    with chat("import os; os.dup2(os.open('out', os.O_WRONLY | os.O_CREAT), 1); ") as terminal:
        terminal.type("short\r")
        terminal.expect("short")
        terminal.expect(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0
    assert (tmp_path / "out").read_text() == "ready\n<short> word 1 word 2 word 3\nleft\n"


@pytest.mark.parametrize("history", ["a folder", "unreadable text", "a link", "a folder that cannot be written"])
def test_no_history_stops_the_chat(chat, tmp_path, history):
    path = tmp_path / "state" / "kvq" / "chat_history"
    path.parent.mkdir(parents=True)
    match history:
        case "a folder":
            path.mkdir()
        case "unreadable text":
            path.write_bytes(b"\xff\x00\x1b[2J\x9b\n")
        case "a link":
            path.symlink_to(tmp_path / "elsewhere")
        case _:
            path.parent.rmdir()
            path.parent.write_text("")
    with chat() as terminal:
        terminal.type(UP + CTRL_C)
        terminal.expect(PROMPT)
        terminal.type("short\r")
        terminal.expect("<short>")
        assert "\x1b[2J" not in terminal.text
    if history == "a link":
        assert (tmp_path / "elsewhere").read_text() == "short\n" and path.is_symlink()

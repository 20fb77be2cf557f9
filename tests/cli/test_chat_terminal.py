"""`kvq chat` typed at a pseudo-terminal: Ctrl-C, Ctrl-D, several lines, history across runs."""

import os
import re
import stat

import pytest
from terminal import CTRL_C, CTRL_D, UP, Terminal

FAKE = "from fake_chat import main; main()"


@pytest.fixture
def chat(tmp_path, monkeypatch):
    """Starts a chat with a model that needs no time to load."""
    support = os.path.join(os.path.dirname(__file__), "..", "support")
    monkeypatch.setenv("PYTHONPATH", support, prepend=os.pathsep)

    def start() -> Terminal:
        terminal = Terminal(FAKE, tmp_path, XDG_STATE_HOME=str(tmp_path / "state"))
        terminal.expect("ready")
        terminal.expect("> ")
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
        terminal.expect("> ")
        terminal.type("short\r")
        terminal.expect(
            "<short> word 1 word 2 word 3\r\n[context 4 of 100 tokens; cache 1 B, 8 B at 16 bit; 2.0 tokens/s]"
        )
        terminal.expect("> ")
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
        terminal.expect("> ")
        terminal.type("short\r")
        terminal.expect("<short> word 1 word 2 word 3\r\n[context")


def test_several_lines_and_history_across_runs(chat, tmp_path):
    with chat() as terminal:
        terminal.type("short \\\rand more\r")
        terminal.expect("<short \r\nand more>")
        terminal.expect("> ")
        terminal.type('"""short\r\r/exit is text here"""\r')
        terminal.expect("<short\r\n\r\n/exit is text here>")
        terminal.expect("> ")
        terminal.type("/exit\r")
        assert terminal.exit_code() == 0
    history = tmp_path / "state" / "kvq" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert history.read_text().splitlines() == ["short \\", "and more", '"""short', '/exit is text here"""', "/exit"]
    with chat() as terminal:
        terminal.type(UP * 4 + "\r")  # and more
        terminal.expect("<and more>")

"""Results on stdout, everything else on stderr; --json prints one document."""

import json
import math
import sys

import pytest
from fake_chat import FakeConversation

from kvq_cli.cli.chat_session import ChatSession
from kvq_cli.cli.interrupts import Interrupts
from kvq_cli.cli.output import Output, human_bytes
from kvq_cli.cli.text_generator import write_stdout


@pytest.fixture(autouse=True)
def stdout_back(monkeypatch):
    """`--json` redirects sys.stdout, which the command line's `main` puts back: here this does."""
    monkeypatch.setattr(sys, "stdout", sys.stdout)


def everything(out: Output) -> None:
    print("a library prints")
    out.note("note")
    out.warn("warning")
    out.text("text")
    out.table(["a", "b"], [["x", 1.23456], ["y", None]], title="table")
    out.result({"answer": 42})


def test_output_without_json(capsys):
    everything(Output())
    stdout, stderr = capsys.readouterr()
    assert [word in stdout for word in ("library", "text", "table", "1.235", "answer")] == [True] * 4 + [False]
    assert stderr == "note\nkvq: warning: warning\n"


def test_json_is_the_only_thing_on_stdout(capsys):
    everything(Output(as_json=True))
    stdout, stderr = capsys.readouterr()
    assert json.loads(stdout) == {"answer": 42}
    assert all(word in stderr for word in ("library", "note", "warning", "text", "table"))


def test_quiet_keeps_results_and_warnings(capsys):
    everything(Output(quiet=True))
    stdout, stderr = capsys.readouterr()
    assert "text" in stdout and stderr == "kvq: warning: warning\n"


def test_answers_are_escaped_on_a_terminal_alone(capsys, monkeypatch):
    pieces = ["a\tb\n\x1b]52;c;", "eA==\x07", "\r\x9b2J", "\u05d0\u200f \u65e5"]
    for piece in pieces:
        write_stdout(piece)
    assert capsys.readouterr().out == "".join(pieces)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for piece in pieces:
        write_stdout(piece)
    assert capsys.readouterr().out == "a\tb\n\\x1b]52;c;eA==\\x07\\r\\x9b2J\u05d0\u200f \u65e5"


def test_a_chat_escapes_its_answers_on_a_terminal(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    ChatSession(FakeConversation(), Output(), Interrupts()).say("short \x1b]52;c;eA==\x07")
    assert capsys.readouterr().out == "<short \\x1b]52;c;eA==\\x07> word 1 word 2 word 3\n"


@pytest.mark.parametrize("writer", ["text", "prose", "note", "warn"])
def test_names_cannot_change_the_direction_of_text(capsys, writer):
    getattr(Output(), writer)("kivi\u202egnp\u2066.\u200f\x1b[2J")
    assert "kivi\\u202egnp\\u2066.\\u200f\\x1b[2J\n" in "".join(capsys.readouterr())


def test_wide_tables_are_not_cut_in_a_pipe(capsys):
    Output().table(["name", "what"], [["x" * 60, "y" * 100]])
    assert "y" * 100 in capsys.readouterr().out


def test_human_bytes():
    assert [human_bytes(n) for n in (0, 1023, 1536, 5 * 2**20, 3 * 2**30, 2**42)] == [
        *("0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3.0 GiB", "4.0 TiB")
    ]


def test_json_has_no_infinity_and_no_nan(capsys):
    Output(as_json=True).result({"us": math.inf, "gain": [math.nan, 2.5], "name": "a\udce9"})
    found = json.loads(capsys.readouterr().out, parse_constant=lambda text: pytest.fail(text))
    assert found == {"us": None, "gain": [None, 2.5], "name": "a\udce9"}


def test_warnings_have_no_control_characters(capsys):
    Output().warn("left out: \x1b[2J\n\x9b2J")
    assert capsys.readouterr().err == "kvq: warning: left out: \\x1b[2J \\x9b2J\n"

"""The `kvq` command: imports, error lines, exit codes, Ctrl-C."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import click
import pytest
import typer
from tiers import slow_cases

from kvq_cli.cli import app as module
from kvq_cli.errors import KvqError, UsageError

COMMANDS = [[], *[[name] for name, *_ in module.COMMANDS], ["evaluate"], ["bench", "generate"]]


def test_help_needs_no_heavy_imports():
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from kvq_cli.cli.app import app\n"
        f"for command in {COMMANDS!r}:\n"
        "    result = CliRunner().invoke(app, [*command, '--help'])\n"
        "    assert result.exit_code == 0, (command, result.output)\n"
        "    assert 'Usage:' in result.stdout, command\n"
        "names = {'torch', 'transformers', 'numpy', 'datasets', 'faiss', 'matplotlib', 'prompt_toolkit'}\n"
        "heavy = names & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_file_adds_a_method(tmp_path):
    """Also for processes that the command starts, which inherit it."""
    (tmp_path / "my.py").write_text(
        "from dataclasses import dataclass\n"
        "from kvq_cli.methods.kivi import Kivi\n"
        "from kvq_cli.methods.registry import register\n"
        "@register\n@dataclass(frozen=True)\nclass Mine(Kivi):\n    name = 'mine'\n"
    )
    (tmp_path / "none.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text("import nowhere\n")

    def run(*words):
        return subprocess.run([sys.executable, "-m", "kvq_cli", *words], capture_output=True, text=True, cwd=tmp_path)

    done = run("--plugin", "my.py", "plan", "--compare", "kivi,mine", "--bits", "2", "--memory", "4GB", "--json")
    assert done.returncode == 0, done.stderr
    one, other = json.loads(done.stdout)["methods"]
    assert other.pop("method") == "mine-2bit" and one.pop("method") == "kivi-2bit" and one == other
    for file, code, says in (
        ("none.py", 1, "none.py: registers no method: decorate its class with kvq_cli.methods.registry.register"),
        ("broken.py", 1, "broken.py: cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("gone.py", 2, "--plugin gone.py: no such file; give the Python file of a method"),
    ):
        done = run("--plugin", file, "methods")
        assert done.returncode == code and says in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_research_has_a_heading_of_its_own(kvq):
    def listed(*words):
        return re.findall(r"^│ ([a-z]+) ", kvq(*words, "--help").stdout.split(heading)[1], flags=re.MULTILINE)

    heading = " Research "
    assert listed() == ["analyze", "reproduce"]
    heading = " Kernel development "
    assert listed("bench") == ["kernels", "tune", "report"]


def test_help_shows_everyday_options_and_help_all_the_others(kvq):
    def shown(flag):
        return set(re.findall(r"^│ (?:\* +)?(--[a-z-]+)", kvq("eval", flag).stdout, flags=re.MULTILINE))

    everyday, every = shown("--help"), shown("--help-all")
    assert everyday == {
        *("--task", "--compare", "--method", "--bits", "--artifact", "--set", "--model", "--device", "--dataset"),
        *("--seqlen", "--samples", "--out", "--help-all", "--help"),
    }
    command = typer.main.get_command(module.app).commands["eval"]
    assert every == {parameter.opts[0] for parameter in command.params} | {"--help"}


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command and group below `group`, with its words."""
    for name, command in group.commands.items():
        yield (*path, name), command
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))


@pytest.mark.parametrize(
    ("meaning", "name", "said_by"),
    [
        (
            "Number of (samples|text windows|windows of)",
            "samples",
            {"calibrate", "eval", "tune", "analyze", "bench calibrate"},
        ),
        ("Tokens per (sample|window)", "seqlen", {"calibrate", "eval", "tune", "analyze", "bench calibrate"}),
        ("Tokens per sequence", "context", {"bits", "plan", "recommend"}),
    ],
)
def test_an_option_has_one_spelling_in_all_commands(meaning, name, said_by):
    """`kvq tune` also has those of the texts that it measures."""
    found = {
        (" ".join(path), parameter.opts[0])
        for path, command in commands(typer.main.get_command(module.app))
        for parameter in command.params
        if re.match(meaning, getattr(parameter, "help", None) or "")
    }
    assert {path for path, _ in found} == said_by
    assert {option.replace("--text-", "--") for _, option in found} == {f"--{name}"}


@pytest.mark.parametrize("words", [(), *dict(commands(typer.main.get_command(module.app)))], ids=" ".join)
def test_short_help_is_the_help_and_fits_100_columns(kvq, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "100")
    short, long = (kvq(*words, flag) for flag in ("-h", "--help"))
    assert short.exit_code == 0 and short.stdout == long.stdout and "Usage:" in short.stdout
    assert max(map(len, short.stdout.splitlines())) <= 100


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell):
    given = {"COMP_WORDS": "kvq me", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "kvq me"}
    given |= {"_KVQ_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    code = "from kvq_cli.cli.app import app; app(prog_name='kvq')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | given)
    assert "methods" in done.stdout and "bench" not in done.stdout, done.stderr


def test_help_is_fast():
    """Beside the libraries that print it: so a slow or busy processor spoils nothing. The least of five."""

    def seconds(*words: str) -> float:
        before = os.times()
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    words = ["-c", "import typer, typer.rich_utils"], ["-m", "kvq_cli", "--help"]
    libraries, own = map(min, zip(*([seconds(*each) for each in words] for _ in range(5)), strict=True))
    assert own < 3 * libraries, (own, libraries)  # importing torch would make it 10 times


def test_version_and_no_arguments(kvq):
    assert kvq("--version").stdout.startswith("kvq 0.")
    bare = kvq()
    assert bare.exit_code == 2 and "Usage:" in bare.stdout and bare.stderr == ""


def test_evaluate_is_an_alias_of_eval(kvq):
    alias, name = (kvq(command, "--help").stdout.split() for command in ("evaluate", "eval"))
    assert [w.replace("evaluate", "eval") for w in alias] == [w.replace("evaluate", "eval") for w in name]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["generate", "--nonsense"], "--nonsense"),
        (["generate", "x", "--dtype", "int8"], "float32"),
        (["generate", "x", "--max-new-tokens", "0"], "--max-new-tokens"),
    ],
)
def test_wrong_usage_is_one_line(fails, arguments, says):
    fails(*arguments, code=2, says=says)


class Raises:
    """An app with the error handling of kvq and a single command that raises."""

    def __init__(self, error: BaseException):
        self.app = typer.Typer(cls=module.KvqGroup)

        def command() -> None:
            raise error

        self.app.command("run")(command)
        self.app.callback()(lambda: None)

    def __call__(self):
        from typer.testing import CliRunner

        return CliRunner().invoke(self.app, ["run"])


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KvqError("two\n  lines"), 1, "kvq: error: two lines"),
        (UsageError("--bits 9"), 2, "kvq: error: --bits 9"),
        (OSError(28, "No space left on device", "out/x"), 1, "kvq: error: out/x: No space left on device"),
        (PermissionError(13, "Permission denied", "/x"), 1, "kvq: error: /x: Permission denied"),
        (ZeroDivisionError("oops"), 1, "kvq: error: ZeroDivisionError: oops (KVQ_DEBUG=1 shows the traceback)"),
        (KeyboardInterrupt(), 130, "kvq: interrupted"),
    ],
)
def test_errors_are_one_line(error, code, line):
    result = Raises(error)()
    assert (result.exit_code, result.stderr.strip(), result.stdout) == (code, line, "")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: ...")])
def test_out_of_memory_error_names_remedies(error):
    assert "shorten the context" in Raises(error)().stderr


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("KVQ_DEBUG", "1")
    stderr = Raises(KvqError("why"))().stderr
    assert "Traceback" in stderr and stderr.strip().endswith("kvq: error: why")


@pytest.mark.parametrize("wait", [0.1, 0.4, 0.8, 1.4, 2.5])
def test_interrupt_exits_with_130_at_any_time(kvq_process, wait):
    """Before, while and after torch is imported; chat waits for its input, so that it never ends by itself."""
    process = kvq_process("chat", "--method", "fp16")
    time.sleep(wait)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize("words", [["methods", "--json"], ["methods"], ["--help"]], ids=" ".join)
def test_a_pipe_that_nobody_reads_is_no_error_message(monkeypatch, words):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # with it, no text is left to be written at the exit
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "kvq_cli", *words], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 1 and "BrokenPipe" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("command", "returned", "says"),
    [("generate", 2, "the prompt is empty"), *slow_cases(("chat", 0, "Ctrl-D quits"))],
)
def test_closed_input(command, returned, says):
    words = [sys.executable, "-m", "kvq_cli", command]
    closed = subprocess.run(["sh", "-c", 'exec "$@" <&-', "-", *words], capture_output=True, text=True)
    assert closed.returncode == returned and says in closed.stderr, closed.stderr


def test_closed_and_ascii_streams(tmp_path):
    words = [sys.executable, "-m", "kvq_cli", "bench", "report", str(tmp_path)]
    closed = subprocess.run(["sh", "-c", 'exec "$@" >&-', "-", *words], capture_output=True, text=True)
    assert closed.returncode == 1 and closed.stderr.startswith("kvq: error: no results of a GPU"), closed.stderr
    code = "import typer; from kvq_cli.cli.app import KvqGroup; app = typer.Typer(cls=KvqGroup)\n"
    code += "app.callback()(lambda: None); app.command('run')(lambda: print('\\u00b1')); app(['run'])"
    for encoding in ("ascii", "ascii:surrogateescape"):  # the locale C has the latter
        ascii = {**os.environ, "PYTHONIOENCODING": encoding}
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ascii)
        assert (said.returncode, said.stdout) == (0, "?\n"), said.stderr

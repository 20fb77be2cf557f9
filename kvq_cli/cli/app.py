"""The `kvq` command: its subcommands, and the conversion of every failure to one line and an exit code."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvq_cli import __version__
from kvq_cli.cli.command_line import remember
from kvq_cli.cli.examples import epilog
from kvq_cli.cli.failures import explain, one_line
from kvq_cli.cli.interrupts import inside_import
from kvq_cli.cli.rules import AnnouncingCommand
from kvq_cli.errors import UsageError

#: The help panel of what studies methods and kernels.
RESEARCH = "Research"
#: Name, `module:attribute` in kvq_cli.cli, help panel. None of these modules imports torch.
COMMANDS = (
    ("recommend", "recommend:recommend", "Compress"),
    ("calibrate", "calibrate:calibrate", "Compress"),
    ("tune", "tune:tune", "Compress"),
    ("push", "push:push", "Compress"),
    ("generate", "generate:generate", "Compress"),
    ("chat", "chat:chat", "Compress"),
    ("serve", "serve:serve", "Compress"),
    ("eval", "eval:evaluate", "Evaluate"),
    ("bench", "bench:app", "Evaluate"),
    ("inspect", "inspect:inspect", "Inspect"),
    ("methods", "methods:methods", "Inspect"),
    ("bits", "bits:bits", "Inspect"),
    ("plan", "plan:plan", "Inspect"),
    ("results", "results:results", "Inspect"),
    ("report", "report:report", "Inspect"),
    ("analyze", "analyze:analyze", RESEARCH),
    ("reproduce", "reproduce:reproduce", RESEARCH),
)
ALIASES = {"evaluate": "eval"}
#: Commands that pass on options which they do not know. They have no short options: typer would find these in vLLM's,
#: such as -h in -dph.
PASSING = {"serve": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": ["--help"]}}
#: Options of all commands that print their help.
HELP = {"help_option_names": ["-h", "--help"]}


class KvqGroup(TyperGroup):
    """The top-level command group: reports every failure as one line on stderr and an exit code."""

    # typer.Context derives from the vendored click's Context, which is not public.
    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        return super().get_command(ctx, ALIASES.get(cmd_name, cmd_name))

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        _prepare_streams()
        remember(sys.argv[1:] if args is None else args)
        stdout = sys.stdout  # --json redirects it to stderr while a command runs
        with _interrupt() as interrupted:
            try:
                code = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
            except (KeyboardInterrupt, SystemExit, GeneratorExit):
                raise
            except BaseException as error:  # a panic of Rust, in tokenizers, is no Exception
                # Ctrl-C inside an import or a C extension can be raised as another error.
                code = 130 if interrupted else _report(error)
            finally:
                sys.stdout = stdout
                _discard_after_broken_pipe(stdout)
        if code == 130:
            print("kvq: interrupted", file=sys.stderr)
        if standalone_mode:
            sys.exit(code)
        return code


def _prepare_streams() -> None:
    """Make all streams usable: closed output streams discard text, a closed input stream is empty, unencodable
    characters become `?`, and input bytes that are not UTF-8 are kept as surrogates, which commands refuse."""
    if sys.stdin is None:
        sys.stdin = open(os.devnull, encoding="utf-8")  # noqa: SIM115 (open until the process ends)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (open until the process ends)
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


def _discard_after_broken_pipe(stdout: Any) -> None:
    """Discard text that nobody reads any more, as in `kvq methods --json | head`: Python would complain at its exit."""
    try:
        stdout.flush()
    except BrokenPipeError:
        with open(os.devnull, "w", encoding="utf-8") as null:
            os.dup2(null.fileno(), stdout.fileno())
    except (OSError, ValueError):  # a full disk, a closed stream: Python reports these at its exit
        pass


@contextmanager
def _interrupt() -> Iterator[list[int]]:
    """Turn SIGINT and SIGTERM into KeyboardInterrupt; yields the list of signals received.

    SIGTERM comes from `kill` and job schedulers. KeyboardInterrupt lets commands keep finished work and say how to
    resume.
    """
    received: list[int] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        if inside_import(frame):  # no work has begun yet
            if sys.__stderr__ is not None:
                os.write(sys.__stderr__.fileno(), b"kvq: interrupted\n")
            os._exit(130)
        received.append(signum)
        signal.default_int_handler(signum, frame)

    defaults: dict[int, Callable[[int, FrameType | None], Any] | signal.Handlers] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
    }
    # Leave a signal alone that is ignored or handled by someone else.
    replaced = [number for number, default in defaults.items() if signal.getsignal(number) is default]
    for number in replaced:
        signal.signal(number, handler)
    try:
        yield received
    finally:
        for number in replaced:
            if signal.getsignal(number) is handler:  # `kvq chat` ignores Ctrl-C at its end
                signal.signal(number, defaults[number])


def _report(error: BaseException) -> int:
    """Print the error as one line, after its traceback with KVQ_DEBUG=1; returns the exit code."""
    if os.environ.get("KVQ_DEBUG") == "1":
        traceback.print_exception(error)
    message, code = explain(error)
    if message:  # empty where `kvq` without arguments has printed its help
        print(f"kvq: error: {one_line(message)}", file=sys.stderr)
    return code


def _version(show: bool) -> None:
    if show:
        print(f"kvq {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")]


def _plugins(files: list[Path] | None) -> list[Path] | None:
    """Let this process and those that it starts load these methods."""
    for file in files or []:
        if not file.is_file():
            raise UsageError(f"--plugin {file}: no such file; give the Python file of a method")
    if files:
        from kvq_cli.methods.registry import PLUGIN_FILES

        os.environ[PLUGIN_FILES] = os.pathsep.join(str(file.resolve()) for file in files)
    return files


Plugin = Annotated[
    list[Path] | None,
    typer.Option(
        "--plugin",
        metavar="FILE.py",
        callback=_plugins,
        help="Run a Python file that registers methods of your own; repeatable. It stands before the command.",
    ),
]


def _root(version: Version = False, plugin: Plugin = None) -> None:
    """Compress the KV cache of a transformer language model to 1-4 bits per number, and evaluate accuracy, memory and
    speed.

    Every command runs on a small built-in model by default: offline, on a CPU.

    Exit codes: 0 success, 1 failure, 2 wrong usage, 130 interrupted. KVQ_DEBUG=1 prints the traceback of an error.
    """


def _build() -> typer.Typer:
    root = typer.Typer(cls=KvqGroup, no_args_is_help=True, pretty_exceptions_enable=False, context_settings=HELP)
    root.callback()(_root)
    for name, place, panel in COMMANDS:
        module, attribute = place.split(":")
        command = getattr(import_module(f"kvq_cli.cli.{module}"), attribute)
        if isinstance(command, typer.Typer):
            root.add_typer(command, name=name, rich_help_panel=panel, epilog=epilog(name))
        else:
            settings: dict[str, Any] = PASSING.get(name, {})
            add = root.command(
                name, cls=AnnouncingCommand, context_settings=settings, rich_help_panel=panel, epilog=epilog(name)
            )
            add(command)
    return root


app = _build()

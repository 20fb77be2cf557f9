"""The `kvq` command: its table of subcommands, and how any failure becomes one line and an exit code."""

from __future__ import annotations

import io
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvq_cli import __version__
from kvq_cli.cli.examples import epilog
from kvq_cli.errors import KvqError

#: name, where it lives (module of kvq_cli.cli, attribute), help panel. None of these modules imports torch.
COMMANDS = (
    ("calibrate", "calibrate:calibrate", "Compress"),
    ("generate", "generate:generate", "Compress"),
    ("chat", "chat:chat", "Compress"),
    ("eval", "eval:evaluate", "Measure"),
    ("bench", "bench:app", "Measure"),
    ("analyze", "analyze:analyze", "Measure"),
    ("inspect", "inspect:inspect", "Look up"),
    ("methods", "methods:methods", "Look up"),
    ("bits", "bits:bits", "Look up"),
    ("plan", "plan:plan", "Look up"),
    ("results", "results:results", "Look up"),
    ("reproduce", "reproduce:reproduce", "Measure"),
)
ALIASES = {"evaluate": "eval"}


class KvqGroup(TyperGroup):
    """The top group: ends every failure in one line on stderr and the exit code that belongs to it."""

    def get_command(self, ctx: typer.Context, name: str) -> Any:
        return super().get_command(ctx, ALIASES.get(name, name))

    def main(self, *args: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        _mend_streams()
        stdout = sys.stdout  # --json points it at stderr for the length of a command
        with _interrupt() as interrupted:
            try:
                code = super().main(*args, standalone_mode=False, **extra)
            except Exception as error:
                # Ctrl-C inside an import or a C extension can come out as another error.
                code = 130 if interrupted else _report(error)
            finally:
                sys.stdout = stdout
        if code == 130:
            print("kvq: interrupted", file=sys.stderr)
        if standalone_mode:
            sys.exit(code)
        return code


def _mend_streams() -> None:
    """Closed streams swallow what is printed; characters that an encoding lacks are printed as `?`; bytes that are no
    text are handed on, for the command to refuse."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (for the whole process)
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


@contextmanager
def _interrupt() -> Iterator[list[int]]:
    """A list that is no longer empty once the process was told to end, by Ctrl-C or by `kill` and job schedulers.

    Both raise KeyboardInterrupt, so that what is done is kept, children are ended, and what to do next is said.
    """
    seen: list[int] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        if _inside_import(frame):  # some libraries swallow KeyboardInterrupt there, and nothing is half-done yet
            os.write(sys.__stderr__.fileno(), b"kvq: interrupted\n")
            os._exit(130)
        seen.append(signum)
        signal.default_int_handler(signum, frame)

    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    # Not where one is ignored, or somebody else's.
    taken = [number for number, before in usual.items() if signal.getsignal(number) is before]
    for number in taken:
        signal.signal(number, handler)
    try:
        yield seen
    finally:
        for number in taken:
            signal.signal(number, usual[number])


def _inside_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _report(error: Exception) -> int:
    """Print `error` as one line (after its traceback with KVQ_DEBUG=1); return the exit code."""
    if os.environ.get("KVQ_DEBUG") == "1":
        traceback.print_exception(error)
    message, code = _explain(error)
    if message:  # `kvq` alone has printed its help and has no more to say
        print(f"kvq: error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _explain(error: Exception) -> tuple[str, int]:
    if isinstance(error, KvqError):
        return str(error), error.exit_code
    if hasattr(error, "format_message"):  # typer's own errors: unknown flag, missing argument, bad value
        return error.format_message(), getattr(error, "exit_code", 2)
    if isinstance(error, typer.Abort):
        return "input ended before an answer was given", 1
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}", 1
    # On a CPU, PyTorch's allocator raises a RuntimeError.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error):
        return "out of memory: use a shorter context, a smaller batch, fewer bits or --prefill-chunk", 1
    return f"{type(error).__name__}: {error} (KVQ_DEBUG=1 shows where)", 1


def _version(show: bool) -> None:
    if show:
        print(f"kvq {__version__}")
        raise typer.Exit


Version = Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")]


def _root(version: Version = False) -> None:
    """Compress the key-value cache of a transformer language model to 1-4 bits, and measure what that costs.

    Every command works on a small built-in model, offline, on a CPU.

    Exit codes: 0 done, 1 the run failed, 2 wrong usage, 130 interrupted. KVQ_DEBUG=1 shows where an error arose.
    """


def _build() -> typer.Typer:
    root = typer.Typer(cls=KvqGroup, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
    root.callback()(_root)
    for name, place, panel in COMMANDS:
        module, attribute = place.split(":")
        found = getattr(import_module(f"kvq_cli.cli.{module}"), attribute)
        if isinstance(found, typer.Typer):
            root.add_typer(found, name=name, rich_help_panel=panel, epilog=epilog(name))
        else:
            root.command(name, rich_help_panel=panel, epilog=epilog(name))(found)
    return root


app = _build()

"""Output of subcommands: results on stdout, notes on stderr; with --json, a single document on stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvq_cli.cli.failures import escaped, one_line, shortened
from kvq_cli.files import json_text
from kvq_cli.units import human_bytes as human_bytes  # commands import it with `Output`

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class Output:
    """Created by the first line of each command: `out = Output(as_json=as_json, quiet=quiet)`.

    With `as_json`, everything printed afterwards goes to stderr, output of libraries included; only `result` writes to
    stdout.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._stdout = sys.stdout
        if as_json:
            sys.stdout = sys.stderr  # restored by KvqGroup.main
        silence_libraries()

    def note(self, text: str) -> None:
        """Print a note to stderr, unless --quiet."""
        if not self.quiet:
            # Text and line break in one write: targets of `kvq reproduce` that run together print from two threads.
            lines = "\n".join(map(shortened, text.split("\n")))
            print(f"{escaped(lines)}\n", end="", file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Print a warning to stderr, also with --quiet."""
        print(f"kvq: warning: {one_line(text)}\n", end="", file=sys.stderr, flush=True)

    def text(self, text: str) -> None:
        """Print a line of the result to stdout, or to stderr with --json."""
        print(escaped(text), file=sys.stderr if self.as_json else self._stdout, flush=True)

    def prose(self, text: str) -> None:
        """Print sentences of the result as `text` does; on a terminal, lines end between words."""
        from rich.text import Text

        console = self.console(stderr=self.as_json)
        console.print(Text(escaped(text)), soft_wrap=not console.is_terminal)

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[Any]],
        title: str | None = None,
        bold: Sequence[Collection[str]] = (),
        labels: int = 1,
    ) -> None:
        """Print a table of the result to stdout, or to stderr with --json.

        bold: for each column but the first, the row labels (first cells) whose cell is printed in bold.
        labels: number of first columns that name a row; repeated where a terminal is too narrow for one table.
        """
        from kvq_cli.cli.tables import print_table

        print_table(self.console(stderr=self.as_json), columns, [list(row) for row in rows], title, bold, labels)

    def result(self, document: Any) -> None:
        """With --json, print `document` to stdout; without, print nothing."""
        if self.as_json:
            print(json_text(document, ascii_only=True), file=self._stdout, flush=True)

    def console(self, *, stderr: bool = True) -> Console:
        from rich.console import Console

        file = sys.stderr if stderr else self._stdout
        # rich would wrap lines in files and pipes at 80 columns.
        return Console(file=file, highlight=False, width=None if file.isatty() else 240)

    def progress(self) -> Progress:
        """Progress with remaining time: bars on a terminal, else plain lines; nothing with --quiet."""
        from rich import progress

        if not self.quiet and not sys.stderr.isatty():
            from kvq_cli.cli.progress_lines import ProgressLines

            return ProgressLines(self.note)
        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
        )
        return progress.Progress(*columns, console=self.console(), disable=self.quiet, redirect_stdout=False)

    @contextmanager
    def phases(self) -> Iterator[Callable[[str, int, int], None]]:
        """Progress by phase; yields a function `show(phase, done, total)`."""
        with self.progress() as progress:
            tasks: dict[str, TaskID] = {}

            def show(phase: str, done: int, total: int) -> None:
                if phase not in tasks:
                    tasks[phase] = progress.add_task(phase, total=total, completed=done)
                progress.update(tasks[phase], completed=done, total=total)

            yield show


def silence_libraries() -> None:
    """Suppress progress bars and messages of libraries; must be called before they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler has levels 0 to 5: print none
    if os.environ.get("KVQ_DEBUG") != "1":
        os.environ["RUST_BACKTRACE"] = "0"  # of a panic in tokenizers
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.disable_progress_bar()

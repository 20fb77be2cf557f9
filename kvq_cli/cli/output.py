"""What a subcommand prints: results on stdout, the rest on stderr; with --json one document and no more on stdout."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID


class Output:
    """One per command run: `out = Output(as_json=as_json, quiet=quiet)` as its first line.

    With `as_json` everything that is printed from now on goes to stderr, also what a library prints, and only `result`
    reaches stdout.
    """

    def __init__(self, *, as_json: bool = False, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self._stdout = sys.stdout
        if as_json:
            sys.stdout = sys.stderr  # put back by the command line's `main`
        silence_libraries()

    def note(self, text: str) -> None:
        """A remark for a person: stderr, unless --quiet."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """A warning: stderr, always."""
        print(f"kvq: warning: {' '.join(text.split())}", file=sys.stderr, flush=True)

    def text(self, text: str) -> None:
        """A line of the result for a person: stdout, or stderr with --json."""
        print(text, file=sys.stderr if self.as_json else self._stdout, flush=True)

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[Any]],
        title: str | None = None,
        bold: Sequence[Collection[str]] = (),
    ) -> None:
        """A table of the result: stdout, or stderr with --json. Columns in which all cells are numbers stand right.

        bold: for each column but the first, the first cells of the rows that are set in bold in it.
        """
        from kvq_cli.cli.tables import print_table

        print_table(self.console(stderr=self.as_json), columns, [list(row) for row in rows], title, bold)

    def result(self, document: Any) -> None:
        """With --json: `document` as the one JSON document on stdout. Without: nothing."""
        if self.as_json:
            print(json.dumps(document, indent=2, default=str), file=self._stdout, flush=True)

    def console(self, *, stderr: bool = True) -> Console:
        from rich.console import Console

        file = sys.stderr if stderr else self._stdout
        # A file or a pipe has no edge to wrap at; rich would take 80 columns.
        return Console(file=file, highlight=False, width=None if file.isatty() else 240)

    def progress(self) -> Progress:
        """Bars with time left, on a terminal and without --quiet: `with out.progress() as p: p.add_task(...)`."""
        from rich import progress

        columns = (
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("left"),
            progress.TimeRemainingColumn(),
        )
        hidden = self.quiet or not sys.stderr.isatty()
        return progress.Progress(*columns, console=self.console(), disable=hidden, redirect_stdout=False)

    @contextmanager
    def phases(self) -> Iterator[Callable[[str, int, int], None]]:
        """A progress bar for each phase: gives `show(phase, done, total)`."""
        with self.progress() as progress:
            tasks: dict[str, TaskID] = {}

            def show(phase: str, done: int, total: int) -> None:
                if phase not in tasks:
                    tasks[phase] = progress.add_task(phase, total=total)
                progress.update(tasks[phase], completed=done)

            yield show


def human_bytes(count: float) -> str:
    """`1536` as `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def silence_libraries() -> None:
    """Keep libraries' own progress bars and chatter off the terminal; set before they are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler: of levels 0 to 5, none
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.disable_progress_bar()

"""`kvq report`: write an HTML page of finished results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvq_cli.cli.options import Json, Quiet
from kvq_cli.cli.output import Output, human_bytes
from kvq_cli.cli.rules import unless

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        help="Folder that `kvq eval`, `reproduce`, `analyze` or `bench` wrote to, or one with several of them.",
    ),
]
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="The page (default: DIR/report.html).")]
Artifacts = Annotated[
    list[Path] | None,
    typer.Option(
        "--artifact",
        metavar="DIR",
        help="Show the errors by layer of this artifact, too; repeatable. Those that the results used are shown if "
        "they are in artifacts/MODEL/.",
    ),
]
Errors = Annotated[
    bool,
    typer.Option("--errors/--no-errors", help="Show the artifacts' errors by layer."),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        metavar="NAME",
        help="Method that paired differences are taken to (default: the first compressed one).",
    ),
]
_with_errors = unless(lambda values: values["errors"], "--no-errors leaves out artifacts: use one", refuse=True)


def report(
    folder: Folder,
    out: Out = None,
    artifact: Annotated[Artifacts, _with_errors] = None,
    errors: Errors = True,
    baseline: Baseline = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write results as one HTML page that needs no network: plots, tables, settings, artifacts' errors."""
    output = Output(as_json=as_json, quiet=quiet)
    from kvq_cli.files import check_writable, write_text
    from kvq_cli.report.page import page

    path = folder / "report.html" if out is None else out
    text = page(folder, (artifact or []) if errors else None, baseline)
    check_writable(path.parent)
    write_text(path, text)
    output.note(f"written: {path} ({human_bytes(path.stat().st_size)})")
    output.result({"page": str(path)})

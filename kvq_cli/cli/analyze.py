"""`kvq analyze`: the papers' studies, each a table, a picture and its numbers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.output import Output

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="The study; without it, all are listed.")]
Dataset = Annotated[str, typer.Option("--dataset", metavar="NAME", help="Text to study; see `kvq calibrate`.")]
Samples = Annotated[int | None, typer.Option("--samples", min=1, help="Windows of text (default: the study's own).")]
Seqlen = Annotated[int | None, typer.Option("--seqlen", min=2, help="Tokens of a window (default: the model's usual).")]
OutDir = Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for NAME.json and NAME.png.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="OPTION=VALUE", help="An option of the study; may be repeated.")
]
_USUAL = 2048


def analyze(
    name: Name = None,
    set_: Set = None,
    dataset: Dataset = "prose",
    samples: Samples = None,
    seqlen: Seqlen = None,
    out_dir: OutDir = Path("results/analyze"),
    model: opt.Model = "reference",
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    seed: opt.Seed = 0,
    config: opt.Config = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
) -> None:
    """Do one of the papers' studies: prints its table, writes its numbers (JSON) and picture (PNG)."""
    out = Output(as_json=as_json, quiet=quiet)
    from kvq_cli.analysis.study import Subject, build
    from kvq_cli.files import check_writable, write_json

    if name is None:
        return _list(out)
    study = build(name, opt.method_options(set_))
    subject = None
    if study.subject:
        from kvq_cli.models import load_model

        loaded = load_model(model, device, dtype)
        length = seqlen or loaded.usual_length(_USUAL)
        subject = Subject(loaded, dataset, samples or study.samples, length, seed)
    check_writable(out_dir)
    with out.phases() as show:
        found = study.run(subject, show)
    document = _about(study, subject) | {
        "columns": list(found.columns),
        "rows": [list(row) for row in found.rows],
        "numbers": found.numbers,
        "notes": list(found.notes),
    }
    write_json(out_dir / f"{name}.json", document)
    _draw(found, f"{name}: {study.source}", out_dir / f"{name}.png")
    out.table(found.columns, found.rows, title=f"{name}: {study.source}")
    for note in found.notes:
        out.text(note)
    out.note(f"written: {out_dir / name}.json and {out_dir / name}.png")
    out.result(document)


def _list(out: Output) -> None:
    from kvq_cli.analysis.study import studies

    found = [
        {
            "name": name,
            "source": cls.source,
            "summary": cls.__doc__.splitlines()[0],
            "options": {field.name: field.default for field in dataclasses.fields(cls)},
        }
        for name, cls in studies().items()
    ]
    rows = [
        [one["name"], one["source"], one["summary"], " ".join(f"{k}={_said(v)}" for k, v in one["options"].items())]
        for one in found
    ]
    out.table(["study", "source", "what it shows", "options (--set)"], rows)
    out.result(found)


def _said(value: object) -> object:
    """An option's value in the form in which it would be typed."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def _about(study, subject) -> dict:
    about = {"study": study.name, "source": study.source, "options": dataclasses.asdict(study)}
    if subject is not None:
        about["model"] = subject.loaded.name
        about |= {key: getattr(subject, key) for key in ("dataset", "samples", "seqlen", "seed")}
        about["dtype"] = str(subject.loaded.model.dtype).removeprefix("torch.")
    return about


def _draw(found, title: str, path: Path) -> None:
    from kvq_cli.pictures import new_figure, save

    figure = new_figure(*found.size)
    found.draw(figure)
    figure.suptitle(title)
    save(figure, path)

"""`kvq analyze`: run a study of the papers and write its table, numbers and figure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvq_cli.cli import options as opt
from kvq_cli.cli.option_groups import grouped
from kvq_cli.cli.output import Output
from kvq_cli.cli.rules import Values, unless
from kvq_cli.options import option_text

if TYPE_CHECKING:
    from kvq_cli.papers.studies.study import Findings, Progress, Study, StudyInput

Name = Annotated[str | None, typer.Argument(metavar="NAME", help="Name of the study; without it, list all studies.")]
Dataset = Annotated[
    str,
    typer.Option(
        "--dataset",
        metavar="NAME",
        help="Text to analyze: prose, pydoc, self, wikitext2, c4, ptb or a file (.txt, .jsonl[:FIELD]).",
    ),
]
Samples = Annotated[int | None, typer.Option("--samples", min=1, help="Number of text windows (default: the study's).")]
Seqlen = Annotated[
    int | None, typer.Option("--seqlen", min=2, help="Tokens per window (default: 2048; the built-in model: 1024).")
]
OutDir = Annotated[Path, typer.Option("--out", metavar="DIR", help="Output folder for NAME.json and NAME.png.")]
Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="OPTION=VALUE", help="An option of the study; repeatable.")
]
DEFAULT_SEQLEN = 2048


def _runs_model(values: Values) -> bool:
    """Whether the study passes text through a model."""
    from kvq_cli.papers.studies.study import ModelStudy, study_class

    return values["name"] is not None and issubclass(study_class(values["name"]), ModelStudy)


_named = unless(lambda values: values["name"] is not None, "studies are listed without NAME")
_only_model = unless(_runs_model, "only a study of a model reads it")


@grouped
def analyze(
    model_options: Annotated[opt.LoadOptions, _only_model],
    output: opt.OutputOptions,
    name: Name = None,
    set_: Annotated[Set, _named] = None,
    dataset: Annotated[Dataset, _only_model] = "prose",
    samples: Annotated[Samples, _only_model] = None,
    seqlen: Annotated[Seqlen, _only_model] = None,
    out_dir: Annotated[OutDir, _named] = Path("results/analyze"),
) -> None:
    """Run a study of the papers: print its table, write its numbers (JSON) and figure (PNG)."""
    out = output.output()
    from kvq_cli.files import check_writable, write_json
    from kvq_cli.papers.studies.study import ModelStudy, StudyInput, build

    if name is None:
        return _list(out)
    study = build(name, opt.method_options(set_))
    data = None
    run: Callable[[Progress], Findings]
    if isinstance(study, ModelStudy):
        loaded = model_options.load()
        length = seqlen or loaded.default_length(DEFAULT_SEQLEN)
        data = StudyInput(loaded, dataset, samples or study.samples, length, model_options.seed)
        run = partial(study.run, data)
        if loaded.shape.attention:
            layers = ", ".join(map(str, loaded.shape.attention))
            out.note(f"note: layers are counted among those with a cache: 0, 1, ... are layers {layers} of the model")
    else:
        run = study.run
    check_writable(out_dir)
    with out.phases() as progress:
        findings = run(progress)
    document = _inputs(study, data) | {
        "columns": list(findings.columns),
        "rows": [list(row) for row in findings.rows],
        "numbers": findings.numbers,
        "notes": list(findings.notes),
    }
    write_json(out_dir / f"{name}.json", document)
    _draw(findings, f"{name}: {study.source}", out_dir / f"{name}.png")
    out.table(findings.columns, findings.rows, title=f"{name}: {study.source}")
    for note in findings.notes:
        out.text(note)
    out.note(f"written: {out_dir / name}.json and {out_dir / name}.png")
    out.result(document)


def _list(out: Output) -> None:
    from kvq_cli.papers.studies.study import studies

    listed, rows = [], []
    for name, cls in studies().items():
        summary = (cls.__doc__ or "").partition("\n")[0]
        options = {field.name: field.default for field in dataclasses.fields(cls)}
        listed.append({"name": name, "source": cls.source, "summary": summary, "options": options})
        rows.append([name, cls.source, summary, " ".join(f"{k}={option_text(v)}" for k, v in options.items())])
    out.table(["study", "source", "summary", "options (--set)"], rows)
    out.result(listed)


def _inputs(study: Study, data: StudyInput | None) -> dict[str, Any]:
    """The study's options, the model and the text, for the result file."""
    inputs: dict[str, Any] = {"study": study.name, "source": study.source, "options": dataclasses.asdict(study)}
    if data is not None:
        inputs["model"] = data.loaded.label
        inputs |= {key: getattr(data, key) for key in ("dataset", "samples", "seqlen", "seed")}
        inputs["dtype"] = str(data.loaded.model.dtype).removeprefix("torch.")
    return inputs


def _draw(findings: Findings, title: str, path: Path) -> None:
    from kvq_cli.figures import new_figure, save

    figure = new_figure(*findings.size)
    findings.draw(figure)
    figure.suptitle(title)
    save(figure, path)

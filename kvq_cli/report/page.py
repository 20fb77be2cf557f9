"""The page of a result folder: one HTML file without references to other files or to the network."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path

from kvq_cli import __version__
from kvq_cli.errors import UsageError, reading
from kvq_cli.evaluation.paired import match_label
from kvq_cli.report import artifacts, comparison, documents
from kvq_cli.report.comparison import Section
from kvq_cli.report.markup import Markup, join, tag
from kvq_cli.report.sources import ResultFolder, find_results
from kvq_cli.report.svg import style_sheet


def page(folder: Path, artifact_folders: Sequence[Path] | None = (), baseline: str | None = None) -> str:
    """The HTML of a folder's results, or of those in its subfolders.

    artifact_folders: artifacts to show beside those that the results used and that are in their default folders;
                      None: show no artifacts, so that the page depends on the results alone.
    baseline:         label of the method that paired differences are taken to.
    KvqError if results cannot be read, UsageError if the methods of no folder have that label.
    """
    found = find_results(folder)
    if baseline is not None:
        _check_baseline(baseline, found)
    title = f"{folder.resolve().name}: results of kvq"
    body: list[Markup] = []
    links: list[Markup] = []
    for number, results in enumerate(found):
        several = len(found) > 1
        if several:
            links.append(tag("a", results.name, href=f"#r{number}"))
            body.append(tag("h2", results.name, id=f"r{number}"))
        with reading(f"{results.path}: not results of kvq", "make them again"):
            sections = list(_sections(results, artifact_folders, baseline))
        for index, (name, content) in enumerate(sections):
            place = f"r{number}s{index}"
            if not several:
                links.append(tag("a", name, href=f"#{place}"))
            body.append(tag("section", tag("h3" if several else "h2", name, id=place), content))
    head = tag("header", tag("h1", folder.resolve().name), _summary(found), tag("nav", links))
    foot = tag("footer", tag("p", f"Made by kvq report, kvq {__version__}."))
    return _document(title, join(head, tag("main", body), foot))


def _check_baseline(baseline: str, found: Sequence[ResultFolder]) -> None:
    """UsageError if the methods of no folder have it; folders without it say so on the page."""
    for results in found:
        with suppress(UsageError):
            match_label(baseline, results.methods)
            return
    match_label(baseline, {label: None for results in found for label in results.methods})


def _sections(
    results: ResultFolder, artifact_folders: Sequence[Path] | None, baseline: str | None
) -> Iterator[Section]:
    if results.methods:
        yield from comparison.sections(results, baseline)
    if artifact_folders is not None:
        used = artifacts.used_artifacts(results.methods, artifact_folders)
        yield from artifacts.sections(used, results.methods)
    yield from documents.sections(results)


def _summary(found: Sequence[ResultFolder]) -> Markup | None:
    """One line: the models, the number of methods, the version that measured."""
    compared = [one for results in found for one in results.methods.values()]
    models = dict.fromkeys(str(one["config"].get("model_args", {}).get("name")) for one in compared)
    versions = dict.fromkeys(str(one["kvq_version"]) for one in compared if "kvq_version" in one)
    if not compared:
        return None
    measured = f", measured with kvq {', '.join(versions)}" if versions else ""
    labels = {label for results in found for label in results.methods}
    return tag("p", f"{len(labels)} {'method' if len(labels) == 1 else 'methods'} on {', '.join(models)}{measured}.")


def _document(title: str, body: Markup) -> str:
    """A complete HTML document. Its content policy lets it load nothing and run only the script that sorts tables."""
    script = _file("sort.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"{tag('title', title)}\n{tag('style', style_sheet(), _file('page.css'))}\n</head>\n"
        f"<body>\n{body}\n<script>{script}</script>\n</body>\n</html>\n"
    )


def _file(name: str) -> Markup:
    return Markup(files(__package__).joinpath(name).read_text(encoding="utf-8"))

"""Sections of a comparison: plots over measured bits, scores, paired differences, claims, settings."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq_cli.errors import KvqError
from kvq_cli.evaluation.base import PERPLEXITY
from kvq_cli.evaluation.leaders import LEADING, leaders
from kvq_cli.evaluation.paired import CAPTION, MARKS, Difference, differences, interval, match_label
from kvq_cli.evaluation.plot import lines_by_method
from kvq_cli.evaluation.ruler.tasks import RULER, TASKS
from kvq_cli.evaluation.runs import samples
from kvq_cli.evaluation.tabulate import EXACT, Column, Entry, Table, tabulate
from kvq_cli.report.charts import Plot, Point, Series, draw, draw_intervals, legend
from kvq_cli.report.markup import Markup, join, tag
from kvq_cli.report.sources import ResultFolder
from kvq_cli.report.tables import Cell, pairs, table, value_text

#: More points than this get a legend only, no labels of their own.
MAX_LABELS = 14
BITS = "measured bits"
_NAMES = {"KL to fp16": "KL divergence to the uncompressed model", "top-1": "top-1 agreement (%)"}

Section = tuple[str, Markup]


def sections(found: ResultFolder, baseline: str | None) -> Iterator[Section]:
    """Title and content of each section.

    baseline: label of the method that paired differences are taken to; by default the first compressed method.
    """
    methods = found.methods
    scores = tabulate(methods)
    yield from _plots(scores, methods)
    yield (
        "Scores",
        join(tag("p", SCORES, class_="note"), score_table(scores, methods, found.path), _failures(found.failed)),
    )
    yield from _differences(found, baseline)
    if found.claims:
        yield "Claims of the papers", join(tag("p", CLAIMS, class_="note"), _markdown_table(found.claims))
    yield "Command and settings", _settings(found)
    yield "Methods", _methods(methods)


SCORES = (
    f"Mean ± standard error over n samples. {LEADING} Bits measured count all tensors that a sequence holds: codes, "
    "scales, outliers, full-precision windows. A click on a title sorts."
)
CLAIMS = "A star: the 95 % interval excludes zero. A question mark: the difference may be chance."


def quality_plot(scores: Table, methods: Mapping[str, Mapping[str, Any]], column: Column) -> Plot | None:
    """A column's scores over measured bits, a line per method; None if no compressed method has the score."""
    values, bits = scores.column(column.title), scores.column(BITS)
    lines = lines_by_method({label: one for label, one in methods.items() if label != EXACT})
    direct = sum(map(len, lines.values())) <= MAX_LABELS
    series = []
    for style, (name, labels) in enumerate(lines.items()):
        points = [_point(label, column, values[label], bits[label]) for label in labels]
        if shown := [point for point in points if point is not None]:
            series.append(Series(labels[0] if len(labels) == 1 else name, style, shown))
    if not series:
        return None
    exact = values.get(EXACT, Entry(None)).value
    name = _NAMES.get(column.title, column.title + (" (%)" if column.percent else ""))
    return Plot(
        f"{name} over measured bits per cached number",
        "measured bits per cached number",
        name,
        series,
        log_y=column.better < 0,
        baseline=None if exact is None or column.metric.startswith("kl,") else (EXACT, exact),
        direct=direct,
        frontier=column.better,
    )


def overall(scores: Table) -> list[Column]:
    """The columns over all tasks: KL divergence, perplexity, RULER's mean; without these, the first score."""
    scored = [column for column in scores.columns if column.better]
    wanted = [(PERPLEXITY, "kl,none"), (PERPLEXITY, "perplexity,none")]
    found = [column for each in wanted for column in scored if (column.task, column.metric) == each]
    return found + [column for column in scored if column.task == RULER] or scored[:1]


def score_table(scores: Table, methods: Mapping[str, Mapping[str, Any]], folder: Path) -> Markup:
    """The table of scores, with standard errors, and n below the title of each score. folder: of the results."""
    shown = [
        index
        for index in range(len(scores.columns))
        if any(row[index].value is not None for row in scores.rows.values())
    ]
    titles = [join("method"), *(_title(scores.columns[index], methods) for index in shown)]
    best = leaders(scores, folder, methods)
    rows = [
        [label, *(_score(scores.columns[index], row[index], label in best[index]) for index in shown)]
        for label, row in scores.rows.items()
    ]
    counts = {label: samples(one) for label, one in methods.items()}
    if len(set(counts.values())) > 1:  # of one of them, earlier runs left more samples
        titles, rows = [*titles, join("n of each task")], [[*row, counts[str(row[0])]] for row in rows]
    return table(titles, rows)


def _failures(failed: Mapping[str, str]) -> Markup | None:
    """Methods without a row in the table, with the error of each."""
    return tag("p", f"Left out: {'; '.join(': '.join(each) for each in failed.items())}.") if failed else None


def _plots(scores: Table, methods: Mapping[str, Mapping[str, Any]]) -> Iterator[Section]:
    main = overall(scores)
    large = [plot for column in main if (plot := quality_plot(scores, methods, column))]
    if not large:
        return
    names = None if large[0].direct else legend([(series.name, series.style) for series in large[0].series])
    yield "Quality over measured bits", join(tag("p", FRONTIER, class_="note"), names, _grid(large, "plots large"))
    others = [column for column in scores.columns if column.better and column not in main]
    if small := [plot for column in others if (plot := quality_plot(scores, methods, column))]:
        yield "By task", join(names, _grid(small, "plots"))


FRONTIER = (
    "Bars are standard errors. The dotted line joins the methods that no other excels in both coordinates; fewer bits, "
    "further left, are better."
)


def _grid(plots: Sequence[Plot], class_: str) -> Markup:
    return tag("div", [tag("figure", draw(plot)) for plot in plots], class_=class_)


def _point(label: str, column: Column, entry: Entry, bits: Entry) -> Point | None:
    if entry.value is None or bits.value is None:
        return None
    error = "" if entry.error is None else f" ± {entry.error:.{column.digits}f}"
    tip = f"{label}: {entry.value:.{column.digits}f}{error} at {bits.value:.3f} bits"
    return Point(bits.value, entry.value, tip, entry.error, label)


def _title(column: Column, methods: Mapping[str, Mapping[str, Any]]) -> Markup:
    counts = {count for one in methods.values() if (count := _count(column.task, one))}
    n = tag("span", f"n = {_range(counts)}", class_="n") if counts else None
    return join(column.title, n)


def _count(task: str, document: Mapping[str, Any]) -> int | None:
    """The number of samples behind a task's score; of a mean over tasks, the sum of theirs."""
    counts = {name: each["effective"] for name, each in document["n-samples"].items()}
    if task in counts:
        return counts[task]
    members = document.get("group_subtasks", {}).get(task, [])
    if task == RULER:
        members = [name for name in counts if name in TASKS]
    if task == PERPLEXITY:
        members = [name for name in counts if name.startswith(f"{PERPLEXITY}_")]
    return sum(counts.get(name, 0) for name in members) or None


def _range(counts: Collection[int]) -> str:
    low, high = min(counts), max(counts)
    return f"{low}" if low == high else f"{low}-{high}"


def _score(column: Column, entry: Entry, best: bool) -> Cell:
    if entry.value is None:
        return Cell("")
    text = f"{entry.value:.{column.digits}f}"
    if entry.error is None:
        return Cell(text, entry.value, best)
    error = f"±{entry.error:.{column.digits}f}"
    return Cell(join(text, " ", tag("span", error, class_="error-text")), entry.value, best)


def _differences(found: ResultFolder, baseline: str | None) -> Iterator[Section]:
    if len(found.methods) < 2:
        return
    title = "Paired differences"
    try:
        base, by_method = _paired(found, baseline)
    except KvqError as error:
        yield title, tag("p", f"Not computed: {error}", class_="note")
        return
    if not any(by_method.values()):
        return
    names = list(dict.fromkeys(name for row in by_method.values() for name in row))
    columns = [join("method"), *(join(name, tag("span", _samples(name, by_method), class_="n")) for name in names)]
    rows = [
        [label, *(_interval(row[name]) if name in row else Cell("") for name in names)]
        for label, row in by_method.items()
    ]
    note = f"{CAPTION}; {MARKS}. Negative: lower than {base}."
    yield (
        f"{title} to {base}",
        join(tag("p", note, class_="note"), _forest(by_method, names, base), table(columns, rows)),
    )


def _paired(found: ResultFolder, baseline: str | None) -> tuple[str, dict[str, dict[str, Difference]]]:
    """The baseline and the differences: those stored beside the results, else computed from the sample files."""
    stored, methods = found.differences, found.methods
    wanted = match_label(baseline, methods) if baseline else None
    if stored and wanted in (None, stored["baseline"]):
        return stored["baseline"], {
            label: {name: Difference(**each) for name, each in row.items()} for label, row in stored["methods"].items()
        }
    base = wanted or next((label for label in methods if label != EXACT), next(iter(methods)))
    return base, differences(found.path, methods, base)


def _forest(by_method: Mapping[str, Mapping[str, Difference]], names: Sequence[str], base: str) -> Markup | None:
    """Differences of the loss over all texts, or of the first metric, with their intervals."""
    losses = [name for name in names if name.endswith(" loss")]
    name = f"{PERPLEXITY} loss" if f"{PERPLEXITY} loss" in names else (losses or names)[0]
    rows = []
    for style, (label, row) in enumerate((label, row) for label, row in by_method.items() if label != EXACT):
        each = row.get(name)
        if each is not None and each.low is not None and each.high is not None:
            rows.append(
                (label, style, each.mean, each.low, each.high, f"{label}: {interval(each)}, n = {each.samples}")
            )
    if not rows:
        return None
    rows.sort(key=lambda row: row[2])
    caption = f"{name}: difference to {base}, 95 % confidence intervals"
    return tag("figure", draw_intervals(caption, f"{name}, difference to {base}", rows), tag("figcaption", caption))


def _samples(name: str, by_method: Mapping[str, Mapping[str, Difference]]) -> str:
    return f"n = {_range({row[name].samples for row in by_method.values() if name in row})}"


def _interval(difference: Difference) -> Cell:
    return Cell(interval(difference), difference.mean, difference.differs)


def _markdown_table(text: str) -> Markup:
    """The first table of a Markdown text, as `evaluation.formats.markdown` writes it."""
    lines = [line.strip().strip("|").split(" | ") for line in text.splitlines() if line.strip().startswith("|")]
    cells = [[cell.strip() for cell in line] for line in lines]
    if len(cells) < 2:
        return tag("pre", text)
    width = len(cells[0])
    return table(cells[0], [(row + [""] * width)[:width] for row in cells[2:]])


def _settings(found: ResultFolder) -> Markup:
    first = next(iter(found.methods.values()))
    config = first["config"]
    model = config.get("model_args", {})
    backends = sorted({str(one["config"]["backend"]) for one in found.methods.values() if "backend" in one["config"]})
    facts = {
        "model": model.get("name"),
        "revision": model.get("revision"),
        "dtype": model.get("dtype"),
        "architecture": model.get("fingerprint"),
        "device": config.get("device"),
        "decode attention": backends,
        "samples": {
            name: f"{each['effective']} of {each['original']}" if each.get("original") else each["effective"]
            for name, each in first["n-samples"].items()
        },
        "seed": config.get("random_seed"),
        "limit": config.get("limit"),
        "chat template": config.get("chat_template"),
    }
    settings = {
        name.replace("_", " "): value for name, value in config.get("settings", {}).items() if value is not None
    }
    versions = {key.removesuffix("_version"): first[key] for key in first if key.endswith("_version")}
    return join(_commands(found), pairs(facts | settings | {"versions": versions}))


def _commands(found: ResultFolder) -> list[Markup]:
    """The commands that made the results, with the time of each recorded run."""
    shown = [tag("pre", shlex.join(map(str, found.record["command"])))] if found.record.get("command") else []
    runs = {run["id"]: run for one in found.methods.values() if (run := one["config"].get("run"))}
    for run in runs.values():
        labels = [label for label, one in found.methods.items() if one["config"].get("run") == run]
        text = f"Run {run['id']}, {run.get('time')}: {', '.join(labels)}"
        shown.append(join(tag("p", text), tag("pre", run["command"]) if run.get("command") else None))
    return shown


def _methods(methods: Mapping[str, Mapping[str, Any]]) -> Markup:
    rows = []
    for label, one in methods.items():
        options = dict(one["config"]["method"])
        name = options.pop("name", "")
        artifact = one["config"].get("artifact")
        rows.append(
            [
                label,
                name,
                value_text({key: each for key, each in options.items() if each is not None}),
                str(artifact)[:8] if artifact else "",
            ]
        )
    return table(["label", "method", "options", "artifact (checksum)"], rows)

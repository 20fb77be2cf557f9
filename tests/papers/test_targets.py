"""The targets name existing rows and columns of the papers' tables, methods and studies."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from kvq_cli.benchmarking.accounting import artifact_specs
from kvq_cli.benchmarking.shapes import known_shape
from kvq_cli.errors import UsageError
from kvq_cli.methods.base import Method, ModelShape
from kvq_cli.methods.registry import build_parsed
from kvq_cli.methods.window import Window
from kvq_cli.papers.published import PAPERS, cells, rows
from kvq_cli.papers.targets import REFERENCE, target, targets

TABLES = [entry for entry in targets().values() if entry.table and entry.rows(REFERENCE)]
REPOSITORY = Path(__file__).parents[2]
SOME_MODEL = "meta-llama/Llama-3.1-8B"


def test_every_table_of_the_papers_is_a_target():
    wanted = {
        f"table-{paper.lower()}-{row['table'].lower().replace('.', '')}"
        for paper, file in PAPERS.items()
        for row in rows(file)
        if row["table"][0].isdigit() or row["table"].startswith("B.")
    }
    assert wanted <= set(targets())


@pytest.mark.parametrize("entry", TABLES, ids=lambda entry: entry.id)
def test_rows_and_columns_are_the_papers(entry):
    printed = cells(entry.paper, entry.table)
    if entry.columns:
        for model in (REFERENCE, SOME_MODEL):
            assert set(entry.columns_of(model)) <= {cell.column for cell in printed}
        assert set(entry.rows(REFERENCE)) <= {cell.row for cell in printed}


@pytest.mark.parametrize(("model", "shape"), [(REFERENCE, "reference"), (SOME_MODEL, "llama-3.1-8b")])
def test_every_method_fits_the_model(model, shape):
    for entry in targets().values():
        texts = list(entry.rows(model).values())
        assert len(set(texts)) == len(texts), entry.id
        for method in map(build_parsed, texts):
            if not method.calibrates:
                method.plan(0, known_shape(shape, "--shapes").model_shape(), {})  # raises UsageError if it does not fit


def test_commands_have_the_sizes_of_the_model(tmp_path):
    entry = target("table-temporalkv-6")
    here, there = (shlex.join(entry.command(model)) for model in (REFERENCE, SOME_MODEL))
    assert "--dataset" not in here and "--model" not in here
    assert "--dataset c4 --samples 256 --seqlen 2048" in there and f"--model {SOME_MODEL}" in there
    assert "/Llama-3.1-8B/table-temporalkv-6 " in there
    assert len(target("table-squat-3").rows(REFERENCE)) == 25
    with pytest.raises(UsageError, match="no target 'table-9'"):
        target("table-9")


def test_the_list(kvq):
    found = json.loads(kvq("reproduce", "--json").stdout)
    assert {entry["state"] for entry in found} == {"to do", "needs hardware", "nothing to measure"}
    by_name = {entry["target"]: entry for entry in found}
    assert by_name["table-temporalkv-6"]["needs"] == "meta-llama/Llama-3.1-8B and 2 more, c4"
    assert by_name["table-innerq-3"]["here"] is None
    assert kvq("reproduce", "figure-squat-1").exit_code == 2


def test_several_targets_are_numbered(kvq, monkeypatch):
    monkeypatch.setattr("kvq_cli.papers.run.state", lambda *_: "done")
    lines = kvq("reproduce", "table-temporalkv-6", "table-squat-3").stderr.splitlines()
    assert lines[::2] == ["table-temporalkv-6: 1 of 2", "table-squat-3: 2 of 2"]
    [line] = kvq("reproduce", "table-temporalkv-6").stderr.splitlines()
    assert line.startswith("table-temporalkv-6: done, ")


def test_named_targets_come_before_all_others(kvq, monkeypatch):
    monkeypatch.setattr("kvq_cli.papers.run.state", lambda *_: "done")
    alone = json.loads(kvq("reproduce", "--all", "--json").stdout)
    names = ["compare-2bit", "table-temporalkv-8"]  # the first is no part of --all
    found = [each["id"] for each in json.loads(kvq("reproduce", *names, "--all", "--json").stdout)]
    assert found == names + [each["id"] for each in alone if each["id"] not in names]
    assert len(found) == len(alone) + 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--fast"], "--fast needs --all"),
        (["table-temporalkv-13", "--options", "--samples 2"], "--options: table-temporalkv-13 has a fixed command"),
        (["table-temporalkv-8", "--options", "--set 'a"], "--options --set 'a: No closing quotation"),
        (["table-9"], "no target 'table-9': `kvq reproduce` lists them"),
    ],
)
def test_invalid_requests_are_refused(fails, words, says):
    fails("reproduce", *words, code=2, says=says)


def test_equal_windows_keep_the_same_tokens_exact_at_every_length():
    """Counted from the caches of all methods of the comparison: keys and values of every layer."""
    held: dict[tuple[int, ...], list[str]] = {}
    shared = dict(pair.split("=") for pair in shlex.split(target("compare-fair").options) if "=" in pair)
    for spec in yaml.safe_load((REPOSITORY / "examples/compare.yaml").read_text())["compare"]:
        if spec != "fp16":
            for window in windows(build_parsed(spec, **shared)):
                held.setdefault(tuple(n - window.packed(n) for n in range(201)), []).append(spec)
    (counts,) = held
    assert counts == tuple(n if n < 40 else 40 + (n - 40) % 32 for n in range(201))


def windows(method: Method) -> list[Window]:
    """The windows of all keys and values of a cache of four layers."""
    shape = ModelShape(4, 4, 2, 64, 512, "float16")
    plans = [method.plan(layer, shape, artifact_specs(method, shape, layer)) for layer in range(shape.layers)]
    return [stream.window for plan in plans for stream in plan.kept]

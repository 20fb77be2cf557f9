"""Compact results give the same tables, plots and pages as full results."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvq_cli.evaluation.formats import markdown, with_best
from kvq_cli.evaluation.paired import differences
from kvq_cli.evaluation.plot import plot_comparison
from kvq_cli.evaluation.tabulate import tabulate
from kvq_cli.models import SMOLLM2
from kvq_cli.papers.claims import BY_CHANCE, FAILS, HARDWARE, HOLDS, NOT_READ, Verdict, claims, explain, judge
from kvq_cli.papers.compact import compact, compact_text
from kvq_cli.papers.page import page_text
from kvq_cli.papers.targets import MEASURED, ROOT

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """The folder of a small evaluation of two methods."""
    from typer.testing import CliRunner

    from kvq_cli.cli.app import app

    folder = tmp_path_factory.mktemp("evaluated")
    words = "eval --task perplexity --compare fp16,kivi-2bit:residual=32 --windows 2 --seqlen 96 --quiet"
    result = CliRunner().invoke(app, [*words.split(), "--out", str(folder)])
    assert result.exit_code == 0, result.output
    return folder


def test_a_compact_comparison_gives_the_same_table_plot_and_differences(evaluated, tmp_path):
    full = json.loads((evaluated / "comparison.json").read_text())
    reduced = json.loads(compact_text(compact(full)))
    assert tabulate(reduced["methods"]) == tabulate(full["methods"])
    assert differences(evaluated, reduced["methods"], "kivi") == differences(evaluated, full["methods"], "kivi")
    plot_comparison(full, tmp_path / "full.png")
    plot_comparison(reduced, tmp_path / "reduced.png")
    assert (tmp_path / "full.png").read_bytes() == (tmp_path / "reduced.png").read_bytes()
    assert len(compact_text(reduced)) < (evaluated / "comparison.json").stat().st_size / 2
    assert compact(reduced) == reduced


def test_a_compact_comparison_keeps_the_methods_that_failed(evaluated):
    full = json.loads((evaluated / "comparison.json").read_text())
    assert "failed" not in compact(full)
    assert compact({**full, "failed": {"kivi-1bit": "NaN"}})["failed"] == {"kivi-1bit": "NaN"}


def test_a_compact_study_lacks_only_the_points_of_its_figure():
    study = {"study": "sinks", "rows": [[0, 1.5]], "numbers": {"layers": [{"ratio": 0.1}], "drawn": [1.0] * 100}}
    assert compact(study) == {**study, "numbers": {"layers": [{"ratio": 0.1}]}}
    assert compact({"study": "rank", "rows": [[1, 1 / 3]], "numbers": {}})["rows"] == [[1, 0.333333]]


@pytest.mark.parametrize("document", [[{"a": 0.1}, {"b": None}], {}, [], {"x": {"ä": [1e-300, 2.5e16]}, "y": {}}])
def test_compact_text_is_json_of_the_same_document(document):
    assert json.loads(compact_text(document)) == document


def test_a_changed_method_is_a_changed_line():
    document = {"methods": {"a": {"x": [1, 2]}, "b": {"x": [3, 4]}}}
    assert compact_text(document).splitlines() == ["{", '"methods":{', '"a":{"x":[1,2]},', '"b":{"x":[3,4]}', "}", "}"]


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """The working directory: a folder without artifacts. A clone has the results, but not all artifacts of theirs."""
    for name in ("results", "benchmarks", "examples"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("clone")
def test_reproduction_md_is_computed_from_the_repositorys_results():
    assert page_text(MEASURED) == (REPOSITORY / "docs" / "REPRODUCTION.md").read_text(encoding="utf-8")


@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize("model", MEASURED)
def test_every_reason_quotes_results_that_are_here(model):
    for claim in claims():
        for state in (FAILS, BY_CHANCE):
            assert explain(Verdict(claim, state), model) != NOT_READ, claim.claim


COMPARISONS = sorted((REPOSITORY / ROOT).glob("*/compare-*/claims.md"))


@pytest.mark.parametrize("claims_file", COMPARISONS, ids=lambda file: "-".join(file.parts[-3:-1]))
def test_comparison_md_is_computed_from_the_repositorys_results(claims_file):
    page = (REPOSITORY / "docs" / "COMPARISON.md").read_text(encoding="utf-8")
    table = tabulate(json.loads((claims_file.parent / "comparison.json").read_text(encoding="utf-8"))["methods"])
    assert markdown(table.titles, with_best(table, "**{}**")) in page
    assert claims_file.read_text(encoding="utf-8") in page


def test_readme_quotes_the_repositorys_results(clone):
    page, written = (REPOSITORY / "README.md").read_text(encoding="utf-8"), clone / "README.md"
    empty, tables = re.subn("(<!-- (?:first table|pairs) -->).*?(<!-- end of)", r"\1\2", page, flags=re.DOTALL)
    assert tables == 2
    written.write_text(empty, encoding="utf-8")
    folders = [str(REPOSITORY / ROOT / SMOLLM2 / f"compare-{windows}") for windows in ("2bit", "fair")]
    script = str(REPOSITORY / "tools" / "docs" / "first_table.py")
    subprocess.run([sys.executable, script, *folders, str(written)], check=True)
    assert written.read_text(encoding="utf-8") == page
    states = Counter(judge(claim, SMOLLM2).state for claim in claims())
    counts = [states[name] for name in (HOLDS, BY_CHANCE, FAILS, HARDWARE)]
    text = "{} hold on SmolLM2, {} hold with a reservation (within chance, or at unequal bits), {} do not hold, and {}"
    assert text.format(*counts) in page.replace("\n", " ")

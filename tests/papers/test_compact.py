"""Compact results give the same tables and plots as full results."""

from __future__ import annotations

import json

import pytest

from kvq_cli.evaluation.paired import differences
from kvq_cli.evaluation.plot import plot_comparison
from kvq_cli.evaluation.tabulate import tabulate
from kvq_cli.papers.compact import compact, compact_text


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """The folder of a small evaluation of two methods."""
    from typer.testing import CliRunner

    from kvq_cli.cli.app import app

    folder = tmp_path_factory.mktemp("evaluated")
    words = "eval --task perplexity --compare fp16,kivi-2bit:residual=32 --samples 2 --seqlen 96 --quiet"
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

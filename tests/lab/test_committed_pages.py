"""HTML pages and the picture of docs/ show the tracked results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from html_pages import loaded_urls, read_page

from kvq_cli.evaluation.tabulate import tabulate
from lab.pages.picture import picture

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "results/reproduction/smollm2"
COMMITTED = [path.stem.removeprefix("comparison-smollm2-") for path in ROOT.glob("docs/comparison-smollm2-*.html")]


@pytest.mark.parametrize("name", COMMITTED)
def test_committed_page_has_the_tracked_numbers(name):
    path = ROOT / "docs" / f"comparison-smollm2-{name}.html"
    assert path.stat().st_size < 450_000
    html = path.read_text(encoding="utf-8")
    assert loaded_urls(html) == []
    rows = read_page(html).rows("Scores")
    methods = json.loads((SMOLLM2 / f"compare-{name}" / "comparison.json").read_text())["methods"]
    table = tabulate(methods)
    assert list(rows) == list(methods)
    for label, entries in table.rows.items():
        shown = [cell.value for title, cell in rows[label].items() if title != "method"]
        assert shown == pytest.approx([entry.value for entry in entries], rel=1e-8)
    stored = json.loads((SMOLLM2 / f"compare-{name}" / "differences.json").read_text())
    paired = read_page(html).rows(f"Paired differences to {stored['baseline']}")
    assert list(paired) == list(stored["methods"])
    for label, by_name in stored["methods"].items():
        shown = [cell.value for title, cell in paired[label].items() if title != "method" and cell.value is not None]
        assert sorted(shown) == sorted(each["mean"] for each in by_name.values())


def test_pages_of_smollm2_are_committed():
    assert "2bit" in COMMITTED


def test_committed_picture_is_up_to_date():
    assert (ROOT / "docs" / "quality.svg").read_text(encoding="utf-8") == picture(SMOLLM2 / "compare-2bit") + "\n"

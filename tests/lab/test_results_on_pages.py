"""Pages quote the results of the repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvq_cli.evaluation.formats import markdown
from kvq_cli.evaluation.tabulate import tabulate
from kvq_cli.papers.targets import MEASURED, ROOT
from lab.claims.claims import BY_CHANCE, FAILS, NOT_READ, Verdict, claims, explain
from lab.pages import comparison
from lab.pages.reproduction import pages

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def clone(tmp_path, monkeypatch):
    """The working directory: a folder without artifacts. A clone has the results, but not all artifacts of theirs."""
    for name in ("results", "benchmarks", "examples"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("clone")
def test_reproduction_md_is_computed_from_the_repositorys_results():
    written = pages(MEASURED)
    assert written == {name: (REPOSITORY / "docs" / name).read_text(encoding="utf-8") for name in written}
    assert {Path(name).name for name in written} > {path.name for path in (REPOSITORY / "docs/reproduction").iterdir()}


@pytest.mark.usefixtures("clone")
@pytest.mark.parametrize("model", MEASURED)
def test_every_reason_quotes_results_that_are_here(model):
    for claim in claims():
        for state in (FAILS, BY_CHANCE):
            assert explain(Verdict(claim, state), model) != NOT_READ, claim.claim


@pytest.mark.usefixtures("clone")
def test_comparison_md_is_computed_from_the_repositorys_results():
    written = comparison.pages()
    assert written == {name: (REPOSITORY / "docs" / name).read_text(encoding="utf-8") for name in written}
    committed = {f"comparison/{path.name}" for path in (REPOSITORY / "docs/comparison").iterdir()}
    assert committed == {*written, "comparison/measured.md"} - {"COMPARISON.md"}


COMPARISONS = sorted((REPOSITORY / ROOT).glob("*/compare-*/claims.md"))


@pytest.mark.parametrize("claims_file", COMPARISONS, ids=lambda file: "-".join(file.parts[-3:-1]))
def test_every_comparison_has_a_page(claims_file):
    model, compared = claims_file.parts[-3:-1]
    page = (REPOSITORY / f"docs/comparison/{model}-{compared.removeprefix('compare-')}.md").read_text(encoding="utf-8")
    table = tabulate(json.loads((claims_file.parent / "comparison.json").read_text(encoding="utf-8"))["methods"])
    assert markdown(table.titles, table.cells()) in page
    assert claims_file.read_text(encoding="utf-8").strip() in page

"""Pages and the README quote the results of the repository."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from kvq_cli.evaluation.formats import markdown, with_best
from kvq_cli.evaluation.tabulate import tabulate
from kvq_cli.models import SMOLLM2
from kvq_cli.papers.targets import MEASURED, ROOT
from lab.claims.claims import BY_CHANCE, FAILS, HARDWARE, HOLDS, NOT_READ, Verdict, claims, explain, judge
from lab.pages.reproduction import page_text

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
    words = [sys.executable, "-m", "lab.pages.first_table", *folders, str(written)]
    path = os.pathsep.join([str(REPOSITORY), str(REPOSITORY / "kernels")])
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": path})
    assert written.read_text(encoding="utf-8") == page
    states = Counter(judge(claim, SMOLLM2).state for claim in claims())
    counts = [states[name] for name in (HOLDS, BY_CHANCE, FAILS, HARDWARE)]
    text = "{} hold on SmolLM2, {} hold with a reservation (within chance, or at unequal bits), {} do not hold, and {}"
    assert text.format(*counts) in page.replace("\n", " ")

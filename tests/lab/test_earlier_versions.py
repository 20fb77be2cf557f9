"""Results of an earlier version are judged and shown until they are measured again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from kvq_cli.models import REFERENCE, SMOLLM2
from kvq_cli.papers.run import OLDER, state
from kvq_cli.papers.targets import target
from lab.claims.claims import FAILS, HOLDS, NOT_MEASURED, Claim, judge
from lab.pages.reproduction import pages

CHECKOUT = Path(__file__).parents[2]
STUDY = "figure-temporalkv-15"
RANK = {"columns": ["layer", "W_k"], "rows": [[0, 1.0]], "numbers": {}}
CLAIM = Claim("SQuat", "abstract", "that", targets=[], check='study("rank", "W_k")[0] == 1')


def test_a_result_of_an_earlier_version_is_judged(finished):
    """Published records of RESULTS 1 have no versions."""
    root = finished(target(STUDY), document=RANK, results=None, files=None)
    assert judge(CLAIM, REFERENCE, root).state == HOLDS
    assert judge(replace(CLAIM, check='study("rank", "W_k")[0] == 2'), REFERENCE, root).state == FAILS
    finished(target(STUDY), document=RANK, results=None, command=["kvq", "analyze", "rank", "--samples", "1"])
    assert judge(CLAIM, REFERENCE, root).state == NOT_MEASURED


def test_the_page_says_which_numbers_are_of_an_earlier_version(finished):
    root = finished(target("settings-kivi"))
    assert "earlier version" not in "".join(pages([REFERENCE], root).values())
    finished(target("settings-gear"), results=None)
    page = "".join(pages([REFERENCE], root).values())
    assert "**1 of the 2 finished targets have numbers of an earlier version" in page.split("## ")[0]
    assert [line.split("|")[1].strip() for line in page.splitlines() if f"| {OLDER}" in line] == ["settings-gear"]
    models = "".join(pages([SMOLLM2, REFERENCE], root).values())
    assert "on SmolLM2-135M and the built-in model;" in models and "on the SmolLM2" not in models


def test_a_ranking_of_an_earlier_version_is_on_the_page(finished):
    entry = target("table-innerq-1")
    published = json.loads((CHECKOUT / entry.result(REFERENCE)).read_text())
    root = finished(entry, document=published, results=1)
    assert state(entry, REFERENCE, root) == OLDER
    assert "| table-innerq-1 | built-in model |" in "".join(pages([REFERENCE], root).values())

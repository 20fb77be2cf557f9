"""What targets are measured on, in words."""

from __future__ import annotations

import pytest

from kvq_cli.models import REFERENCE, SMOLLM2
from kvq_cli.papers.targets import target
from lab.claims.measured_on import measured_on


@pytest.mark.parametrize(
    ("name", "model", "text"),
    [
        ("table-temporalkv-6", SMOLLM2, "wikitext2, gsm8k, kjv: 3 windows each, 1024 tokens"),
        ("table-temporalkv-8", SMOLLM2, "pydoc: 4 windows, 1024 tokens"),
        ("table-innerq-1", SMOLLM2, "niah_single_2, niah_single_3, niah_multivalue: 16 answers each, 1024 tokens"),
        ("figure-squat-2", SMOLLM2, "wikitext2"),
        ("figure-squat-2", REFERENCE, "prose"),
        ("compare-fair", REFERENCE, "wikitext2, gsm8k, kjv: 6 windows each"),
        ("perplexity-squat", "some/model", "wikitext2: 2048 tokens"),
        ("sizes-papers", SMOLLM2, ""),
        ("figure-squat-3", SMOLLM2, ""),
    ],
)
def test_texts_and_tasks_of_a_target(name, model, text):
    assert measured_on(target(name), model) == text

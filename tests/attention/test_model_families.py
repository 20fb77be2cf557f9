"""Every family of docs/MODELS.md: exact at 16 bits, decoded by every method, or refused; and the page says so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transformers
from model_matrix import FAMILIES, LARGE_BIASES, REFUSED, examine, refusal
from tiers import slow

from kvq_cli.evaluation.formats import markdown
from lab.pages.models import cells

PAGE = (Path(__file__).parents[2] / "docs" / "MODELS.md").read_text(encoding="utf-8").splitlines()
#: One family for each kind of attention.
FIRST = ("cohere2", "gpt2", "gpt_oss", "phi3", "qwen2")
#: Families that the page refuses, whose attention functions transformers chooses since 5.24.
SINCE_5_24 = [
    model.config_class.model_type
    for model in (transformers.GPTJForCausalLM, transformers.CodeGenForCausalLM)
    if model._supports_attention_backend
]


def known(families: object) -> list[str]:
    """The families that the installed transformers has."""
    return [name for name in families if name in transformers.CONFIG_MAPPING]


def test_the_page_lists_all_families():
    listed = [line.split("`")[1] for line in PAGE if line.startswith("| `")]
    assert listed == [*FAMILIES, *REFUSED] and len(FAMILIES) >= 25


@pytest.mark.parametrize("family", [*known(FIRST), *slow(*(f for f in known(FAMILIES) if f not in FIRST))])
def test_family_is_exact_and_every_method_decodes(family):
    row = examine(family)
    # Scores of keys with biases of hundreds are thousands, and rounded to float32 as such.
    # The layer input is projected again, in another order of additions, as in test_layer_input.
    limits = {"after RoPE": 2e-5, "before RoPE": 2e-5, "layer input": 5e-5}
    scale = 4 if family in LARGE_BIASES else 1
    assert row.errors and all(error < scale * limits[name] for name, error in row.errors.items()), row.errors
    assert markdown(["model_type", "attention", "exact", "methods"], [cells(row)]).splitlines()[-1] in PAGE


def test_families_that_later_transformers_supports_are_exact_after_rope():
    for row in map(examine, SINCE_5_24):
        assert row.errors.keys() == {"after RoPE"} and row.errors["after RoPE"] < 2e-5
        assert all("transformer.h.0.attn: the cached" in reason for reason in row.refused.values())


@pytest.mark.parametrize("family", [name for name in known(REFUSED) if name not in SINCE_5_24])
def test_family_is_refused(family):
    """Which layer is named depends on the layers' kinds, which older transformers do not say."""
    said = re.sub(r"layer \d+", "layer", refusal(family)).replace("`cache`", "`past_key_values`")
    assert any(line.startswith(f"| `{family}` |") and said in re.sub(r"layer \d+", "layer", line) for line in PAGE)

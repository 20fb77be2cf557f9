"""Published tables next to measured ones: matching of rows to methods, and pairs that are ranked alike."""

from __future__ import annotations

import json

import pytest

from kvq_cli.methods.registry import build_parsed, to_config
from kvq_cli.models import REFERENCE
from kvq_cli.papers.side_by_side import side_by_side
from kvq_cli.papers.targets import target


def compared(scores):
    """A comparison's documents by label: label -> (method, score from 0 to 1 on two of RULER's tasks)."""
    methods = {}
    for label, (text, score) in scores.items():
        results = {task: {"512,none": score} for task in ("vt", "qa_1", "ruler")}
        methods[label] = {
            "results": results,
            "n-samples": {task: {"effective": 2} for task in results},
            "higher_is_better": {task: {"512": True} for task in results},
            "cache": {},
            "config": {"method": to_config(build_parsed(text)), "model_args": {"name": REFERENCE}},
        }
    return methods


SOME = {
    "plain": ("fp16", 1.0),
    "a": ("kivi-2bit", 0.5),
    "b": ("kivi-2bit:sinks=32:recent=96", 0.75),
    "c": ("innerq-2bit", 0.625),
}


def test_rows_and_the_agreement_of_rankings():
    found = side_by_side(target("table-innerq-1"), compared(SOME), REFERENCE)
    assert (
        found.columns[:3] == ["row", "method", "Llama-3.2-1B GSM8k (paper)"] and found.columns[-1] == "ruler mean (kvq)"
    )
    assert found.lines[0] == ["Baseline", "plain", 5.84, 13.12, 51.02, 24.34, 100.0]
    assert found.lines[3] == ["InnerQ", "c", 5.69, 13.64, 49.58, 24.87, 62.5]
    # The paper: KIVI < KIVI+sink < InnerQ. Here: KIVI < InnerQ < KIVI+sink, which turns one of three pairs.
    assert [(entry.same, entry.pairs, entry.same_bits) for entry in found.agreements] == [(2, 3, (2, 3))] * 4


def test_pairs_that_are_measured_equal_rank_nothing():
    scores = {label: (text, 0.5 if label in "bc" else score) for label, (text, score) in SOME.items()}
    found = side_by_side(target("table-innerq-1"), compared({**scores, "a": ("kivi-2bit", 0.25)}), REFERENCE)
    assert [(entry.same, entry.pairs, entry.ties) for entry in found.agreements] == [(2, 2, 1)] * 4


def test_lower_is_better_in_tables_of_perplexity():
    methods = compared(
        {
            "a": ("xquant-2bit:group=64", 0.5),
            "b": ("kivi-2bit:pre_rope=on:group=64", 0.5),
            "c": ("xquant-3bit:group=64", 0.5),
        }
    )
    for label, value in {"a": 9.0, "b": 9.5, "c": 9.2}.items():
        methods[label]["results"] = {"perplexity": {"perplexity,none": value}}
        methods[label]["higher_is_better"] = {"perplexity": {"perplexity": False}}
    found = side_by_side(target("table-xquant-1"), methods, REFERENCE)
    entry = next(entry for entry in found.agreements if (entry.model, entry.published) == ("Llama-3.1-8B", "C4"))
    # The paper: XQuant-3bit 9.89 < XQuant-2bit 12.27 < KIVI*-2bit 15.98; of equal bits only the last two.
    assert (entry.same, entry.pairs, entry.same_bits) == (2, 3, (1, 1))


def test_rows_match_methods_with_other_windows_but_not_with_other_options():
    methods = compared({"a": ("kivi-2bit:sinks=8:recent=32", 0.5), "b": ("squat-2bit:strength=0.01", 0.5)})
    assert side_by_side(target("table-squat-1"), methods, REFERENCE) is None  # KIVI alone
    methods |= compared({"c": ("squat-2bit:sinks=8:recent=32", 0.25)})
    assert [line[:2] for line in side_by_side(target("table-squat-1"), methods, REFERENCE).lines] == [
        ["KIVI", "a"],
        ["SQuat", "c"],
    ]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "comparison.json").write_text(json.dumps({"methods": compared(SOME)}))
    return tmp_path


def test_the_command(kvq, fails, folder):
    shown = kvq("results", folder, "--against", "published", "--format", "markdown").stdout
    assert "InnerQ, GSM8K (table-innerq-1)" in shown and "| InnerQ | c | 5.69 |" in shown and "| 2 of 3 |" in shown
    found = json.loads(kvq("results", folder, "--against", "table-innerq-1", "--json").stdout)
    assert [entry["target"] for entry in found] == ["table-innerq-1"]
    assert found[0]["agreements"][0]["same_bits"] == [2, 3]
    fails("results", folder, "--against", "table-xquant-4", code=1, says="no column with at least two of these")
    fails("results", folder, "--against", "table-9", code=2, says="no target 'table-9'")

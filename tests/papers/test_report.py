"""Tables of finished targets, from documents and sample files."""

from __future__ import annotations

import json
from dataclasses import replace

from kvq_cli.evaluation.tabulate import tabulate
from kvq_cli.papers.report import claims_table
from kvq_cli.papers.scores import read_scores, write_scores
from kvq_cli.papers.targets import target


def evaluated(folder, label, losses):
    """The document of a method with these losses, nats per token; its samples are written to `folder`."""
    records = [{"index": i, "nll": 10 * loss, "kl": loss, "tokens": 10} for i, loss in enumerate(losses)]
    (folder / f"{label}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [{"key": {}}, *records]))
    return {
        "results": {"perplexity": {"perplexity,none": 8.0, "kl,none": 0.25}},
        "higher_is_better": {"perplexity": {"perplexity": False, "kl": False}},
        "cache": {"perplexity-10": {"nominal_bits": 2, "measured_bits": 3.0, "bytes": 1, "ratio": 5, "tokens": 10}},
        "samples": {"perplexity-10": f"{label}.jsonl"},
        "n-samples": {"perplexity": {"effective": len(losses)}},
    }


def test_scores_of_each_window_are_written(tmp_path):
    methods = {name: evaluated(tmp_path, name, at) for name, at in {"a": [0.5, 0.75], "b": [1.5, 1.75]}.items()}
    write_scores(tmp_path, methods)
    assert read_scores(tmp_path) == {
        "a": {"perplexity-10 loss": [0.5, 0.75], "perplexity-10 KL": [0.05, 0.075]},
        "b": {"perplexity-10 loss": [1.5, 1.75], "perplexity-10 KL": [0.15, 0.175]},
    }
    assert read_scores(tmp_path / "nothing") is None


def test_pairs_with_a_method_that_was_left_out_are_left_out(tmp_path):
    methods = {name: evaluated(tmp_path, name, at) for name, at in {"a": [0.5, 0.75], "b": [1.5, 1.8]}.items()}
    pairs = [("first", "a", "b"), ("second", "a", "failed"), ("third", "failed", "b"), ("fourth", "b", "a")]
    columns, rows = claims_table(replace(target("compare-fair"), pairs=pairs), tmp_path, methods, tabulate(methods))
    assert [(row[0], row[-1]) for row in rows] == [("first", "yes"), ("fourth", "no")]
    assert rows[0][:6] == ["first", "a", "b", "8 against 8", "0.25 against 0.25", "3 against 3"]
    assert len(columns) == len(rows[0])

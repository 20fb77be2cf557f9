"""The method in bold leads beyond chance, by paired differences where samples are there, else by errors of means."""

from __future__ import annotations

import json
import sys

import pytest

from kvq_cli.evaluation.leaders import leaders
from kvq_cli.evaluation.tabulate import tabulate

#: Losses of texts that differ far more than the methods do.
TEXTS = (1.0, 2.0, 4.0, 3.0)


def _document(folder, label, losses, kl, name="kivi"):
    samples = f"{label}.jsonl"
    lines = [{"key": {}}]
    lines += [
        {"index": n, "nll": 10 * loss, "kl": 10 * each, "tokens": 10}
        for n, (loss, each) in enumerate(zip(losses, kl, strict=True))
    ]
    (folder / samples).write_text("".join(json.dumps(line) + "\n" for line in lines))
    mean, error = sum(kl) / len(kl), 0.001
    results = {"perplexity,none": sum(losses), "perplexity_stderr,none": 2.5, "kl,none": mean, "kl_stderr,none": error}
    return {
        "results": {"perplexity": results},
        "higher_is_better": {"perplexity": {"perplexity": False, "kl": False}},
        "n-samples": {"perplexity": {"effective": len(losses)}},
        "samples": {"perplexity-64": samples},
        "config": {"method": {"name": name}},
        "cache": {},
    }


@pytest.fixture
def methods(tmp_path):
    """a is better than b on each text; by KL, a and c are alike."""
    return {
        "fp16": _document(tmp_path, "fp16", [text - 1 for text in TEXTS], [0.0] * 4, "fp16"),
        "a": _document(tmp_path, "a", TEXTS, [0.010, 0.012, 0.011, 0.013]),
        "b": _document(
            tmp_path, "b", [text + gap for text, gap in zip(TEXTS, (0.1, 0.12, 0.09, 0.11), strict=True)], [0.1] * 4
        ),
        "c": _document(
            tmp_path,
            "c",
            [text + gap for text, gap in zip(TEXTS, (0.2, 0.1, 0.1, 0.2), strict=True)],
            [0.013, 0.010, 0.012, 0.012],
        ),
    }


def _bold(methods, folder):
    table = tabulate(methods)
    return dict(zip(table.titles[1:], leaders(table, folder, methods), strict=True))


def test_a_lead_on_every_text_is_bold_though_texts_differ_more(methods, tmp_path):
    assert _bold(methods, tmp_path)["perplexity"] == {"a"}


def test_a_lead_within_chance_is_not_bold(methods, tmp_path):
    bold = _bold(methods, tmp_path)
    assert bold["KL to fp16"] == set() and bold["nominal bits"] == set()
    del methods["c"]
    assert _bold(methods, tmp_path)["KL to fp16"] == {"a"}


def test_without_samples_errors_of_means_decide(methods, tmp_path):
    del methods["c"]
    for samples in tmp_path.glob("*.jsonl"):
        samples.unlink()
    bold = _bold(methods, tmp_path)
    assert bold["KL to fp16"] == {"a"}  # 0.0885 apart, with errors of 0.001
    assert bold["perplexity"] == set()  # 0.42 apart, with errors of 2.5


def test_a_lead_over_other_samples_is_not_paired(methods, tmp_path):
    """Of b, only the first two texts are there, on which a has the lower loss by chance of the texts."""
    del methods["c"]
    methods["b"]["n-samples"]["perplexity"]["effective"] = 2
    assert _bold(methods, tmp_path)["perplexity"] == set()


def test_documents_of_earlier_versions_have_no_samples(methods, tmp_path):
    for document in methods.values():
        del document["samples"]
    assert _bold(methods, tmp_path)["perplexity"] == set()


def test_without_scipy_errors_of_means_decide(methods, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    assert _bold(methods, tmp_path)["perplexity"] == set()


def test_one_sample_and_ties_are_not_bold(methods, tmp_path):
    one = {label: _document(tmp_path, label, [2.0 + n], [0.1 + n]) for n, label in enumerate("ab")}
    for document in one.values():
        del (
            document["results"]["perplexity"]["kl_stderr,none"],
            document["results"]["perplexity"]["perplexity_stderr,none"],
        )
    assert _bold(one, tmp_path)["perplexity"] == set()
    tied = dict.fromkeys("ab", methods["a"])
    assert _bold(tied, tmp_path)["perplexity"] == set()

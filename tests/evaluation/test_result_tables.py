"""`kvq results`: table formats, best values, paired differences."""

from __future__ import annotations

import json
import math
import sys

import pytest

from kvq_cli.errors import KvqError
from kvq_cli.evaluation.paired import differences, paired, student_t, with_holm
from kvq_cli.evaluation.tabulate import tabulate


def document(bits, perplexity, vt, samples):
    results = {
        "vt": {"512,none": vt, "512_stderr,none": 0.1},
        "perplexity": {"perplexity,none": perplexity, "perplexity_stderr,none": 0.5, "kl,none": 0.01},
    }
    return {
        "results": results,
        "higher_is_better": {"vt": {"512": True}, "perplexity": {"perplexity": False, "kl": False}},
        "n-samples": {"vt": {"effective": 3}, "perplexity": {"effective": 3}},
        "cache": {"vt-512": {"nominal_bits": bits, "measured_bits": bits + 1, "bytes": 2048, "ratio": 4, "tokens": 9}},
        "config": {"method": {"name": "kivi", "bits": bits}, "model_args": {"name": "reference"}},
        "samples": samples,
    }


@pytest.fixture
def folder(tmp_path):
    """Two methods: the second has a loss that is higher by 0.1, 0.2 and 0.3 on the same windows."""
    scores, losses = {"a": [1.0, 0.0, 1.0], "b": [1.0, 0.0, 0.0]}, {"a": [2.0, 3.0, 4.0], "b": [2.1, 3.2, 4.3]}
    methods = {}
    for label in ("a", "b"):
        vt = [{"index": i, "score": one} for i, one in enumerate(scores[label])]
        windows = [{"index": i, "tokens": 10, "nll": 10 * one, "kl": 0.1} for i, one in enumerate(losses[label])]
        # A longer run left one record more, which is no part of this one.
        windows.append({"index": 3, "tokens": 10, "nll": 1e9, "kl": 0.1})
        for name, records in (("vt-512", vt), ("perplexity-1024", windows)):
            lines = [json.dumps({"key": {}}), *map(json.dumps, records)]
            (tmp_path / f"{label}-{name}.jsonl").write_text("\n".join(lines) + "\n")
        samples = {name: f"{label}-{name}.jsonl" for name in ("vt-512", "perplexity-1024")}
        methods[f"{label}-2bit"] = document(2, math.exp(sum(losses[label]) / 3), sum(scores[label]) / 3, samples)
    (tmp_path / "comparison.json").write_text(json.dumps({"methods": methods}))
    return tmp_path


@pytest.fixture
def means(folder):
    """The same without samples, so that the errors of the means decide what is bold."""
    for samples in folder.glob("*.jsonl"):
        samples.unlink()
    return folder


def test_student_t_quantiles():
    for freedom, value in {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 30: 2.0423, 500: 1.9647}.items():
        assert student_t(freedom) == pytest.approx(value, abs=6e-5)


def test_missing_scipy_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    with pytest.raises(KvqError, match=r"need the package scipy.* pip install '\.\[eval\]'"):
        paired([1.0, 2.0], [2.0, 2.0])


def test_differences_are_paired():
    found = paired([1.1, 2.2, 3.3], [1.0, 2.0, 3.0])
    # mean 0.2, standard deviation 0.1, standard error 0.1 / sqrt(3), t of 2 degrees 4.3027
    assert found.mean == pytest.approx(0.2)
    assert (found.high - found.low) / 2 == pytest.approx(4.3027 * 0.1 / math.sqrt(3), rel=1e-4)
    assert not found.differs and paired([2, 3, 4], [1, 2, 3.1]).differs
    assert paired([1.0], [2.0]).low is None


def test_p_values_are_those_of_the_paired_t_test_corrected_for_the_number_of_methods():
    from scipy.stats import ttest_rel

    samples = {"a": [1.1, 2.2, 3.3], "b": [1.2, 2.21, 3.2], "c": [2.0, 3.01, 4.0], "d": [1.0, 2.0, 3.0]}
    base = [1.0, 2.0, 3.0]
    found = {label: paired(scores, base) for label, scores in samples.items()}
    p = {label: ttest_rel(samples[label], base).pvalue for label in "abc"}
    assert {label: found[label].p for label in "abc"} == pytest.approx(p) and found["d"].p == 1
    corrected = with_holm(found)
    # c has the least p of four, b that of the other three, a that of two
    assert corrected["c"].holm == pytest.approx(4 * p["c"]) and corrected["c"].mark == "†"
    assert corrected["b"].holm == pytest.approx(3 * p["b"]) and corrected["b"].mark == "†"
    assert corrected["a"].holm == pytest.approx(2 * p["a"]) and corrected["a"].mark == "" and corrected["d"].holm == 1
    assert with_holm({"c": found["c"]})["c"].holm is None and found["c"].mark == "*"
    assert paired([1.0], [2.0]).p is None
    assert [paired([100.0] * n, [0.0] * n).differs for n in (2, 5, 6)] == [False, False, True]  # sign test


def test_best_values_exclude_the_uncompressed_cache(folder):
    methods = json.loads((folder / "comparison.json").read_text())["methods"]
    table = tabulate({"fp16": {**methods["a-2bit"]}, **methods})
    assert table.titles == [
        "method",
        "vt",
        "perplexity",
        "KL to fp16",
        "nominal bits",
        "measured bits",
        "cache KiB",
        "x smaller",
    ]
    assert [table.best(index) for index in range(3)] == [{"a-2bit"}, {"a-2bit"}, {"a-2bit", "b-2bit"}]
    assert table.best(4) == set()
    assert table.column("vt")["a-2bit"].value == pytest.approx(200 / 3)
    with pytest.raises(KeyError, match="no column 'gsm8k'"):
        table.column("gsm8k")


def test_metrics_on_a_scale_to_100_are_shown_as_they_are(folder):
    """BLEU by its name, others by a value above 1 of any method; in tables and in paired differences."""
    methods = json.loads((folder / "comparison.json").read_text())["methods"]
    values = {"bleu": (27.1, 0.5), "rouge1": (1.5, 0.5), "f1": (0.25, 0.5), "ter": (40.0, 60.0)}
    for number, (label, one) in enumerate(methods.items()):
        means = {f"{metric},none": both[number] for metric, both in values.items()}
        one["results"] = {"lm_eval:words": means}
        one["higher_is_better"] = {"lm_eval:words": {metric: metric != "ter" for metric in values}}
        one["n-samples"], one["samples"] = {"lm_eval:words": {"effective": 2}}, {"lm_eval:words-64": f"{label}.jsonl"}
        lines = [{"key": {}}, *({"index": index, "scores": means} for index in range(2))]
        (folder / f"{label}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    table = tabulate(methods)
    assert table.titles[1:5] == ["words bleu", "words rouge1", "words f1", "words ter"]
    assert [row[1:5] for row in table.cells()] == [[27.1, 1.5, 25.0, 40.0], [0.5, 0.5, 50.0, 60.0]]
    means = {name: found.mean for name, found in differences(folder, methods, "a")["b-2bit"].items()}
    shown = {name.removeprefix("lm_eval:words-64 "): value for name, value in means.items()}
    assert shown == pytest.approx({"bleu,none": -26.6, "rouge1,none": -1.0, "f1,none": 25.0, "ter,none": 20.0})


def test_formats(kvq, means):
    folder = means
    assert "| a-2bit | **66.7 ±10.0** | **20.086 ±0.500** |" in kvq("results", folder, "--format", "markdown").stdout
    assert r"a-2bit & \textbf{66.7 $\pm$10.0} &" in kvq("results", folder, "--format", "latex").stdout
    lines = kvq("results", folder, "--format", "csv").stdout.splitlines()
    assert lines[0].startswith("method,vt,vt stderr,perplexity,perplexity stderr,KL to fp16,nominal bits")
    assert lines[1].startswith("a-2bit,66.66")
    assert "66.7 ±10.0" in kvq("results", folder).stdout
    assert "66.7 ±10.0" in kvq("results", folder, "--plot", folder / "plot.png").stdout
    assert (folder / "plot.png").stat().st_size > 10_000
    rows = json.loads(kvq("results", folder, "--format", "json").stdout)["rows"]
    assert rows["a-2bit"]["perplexity"] == {"value": pytest.approx(math.exp(3)), "error": 0.5}


def test_chosen_columns_and_a_column_for_each_method(kvq, fails, means):
    folder, chosen = means, ("results", means, "--columns", "nominal bits,perplexity")
    assert kvq(*chosen, "--format", "csv").stdout.splitlines()[0] == "method,nominal bits,perplexity,perplexity stderr"
    assert list(json.loads(kvq(*chosen, "--json").stdout)["rows"]["a-2bit"]) == ["nominal bits", "perplexity"]
    lines = kvq(*chosen, "--transpose", "--format", "markdown").stdout.splitlines()
    assert lines[0] == "| method | a-2bit | b-2bit |" and lines[2] == "| nominal bits | 2 | 2 |"
    assert lines[3].startswith("| perplexity | **20.086 ±0.500** | ")
    shown = kvq(*chosen, "--transpose").stdout.splitlines()
    _, head, _, *rows = (line.split() for line in shown if line.strip())
    assert head == ["method", "a-2bit", "b-2bit"] and [row[0] for row in rows] == ["nominal", "perplexity"]
    fails("results", folder, "--columns", "bit", code=2, says="--columns: no column 'bit'; there are: vt, perplexity")
    assert "--columns has no effect: it shapes the table of means" in kvq(*chosen, "--against", "squat").stderr


@pytest.mark.parametrize("format", ["table", "csv", "markdown", "latex"])
def test_labels_are_escaped_in_all_formats(kvq, folder, format):
    document = json.loads((folder / "comparison.json").read_text())
    document["methods"]["a\u202e\x1b[2J"] = document["methods"].pop("a-2bit")
    (folder / "comparison.json").write_text(json.dumps(document))
    found = kvq("results", folder, "--format", format).stdout
    assert "u202e" in found and "x1b[2J" in found.replace("\\[", "[") and not {"\x1b", "\u202e"} & set(found)


def test_differences_to_a_baseline(kvq, fails, folder):
    found = json.loads(kvq("results", folder, "--baseline", "a", "--json").stdout)
    loss = found["methods"]["b-2bit"]["perplexity-1024 loss"]
    assert found["baseline"] == "a-2bit" and list(found["methods"]) == ["b-2bit"]
    assert loss["mean"] == pytest.approx(0.2) and loss["samples"] == 3
    assert found["methods"]["b-2bit"]["vt-512"]["mean"] == pytest.approx(-100 / 3)
    assert "+0.2 [-0.04841, +0.4484]" in kvq("results", folder, "--baseline", "a").stdout
    fails("results", folder, "--baseline", "kivi", code=2, says="must name one of a-2bit, b-2bit")
    (folder / "a-vt-512.jsonl").unlink()
    fails("results", folder, "--baseline", "a", code=1, says="run the evaluation again")


def test_duplicate_samples_count_once(kvq, folder):
    """Nor does a line that a kill cut short."""
    for path in folder.glob("*.jsonl"):
        key, *records = path.read_text().splitlines(keepends=True)
        path.write_text("".join([key, *records, *records, records[0][:9]]))
    found = json.loads(kvq("results", folder, "--baseline", "a", "--json").stdout)["methods"]["b-2bit"]
    assert found["perplexity-1024 loss"]["samples"] == 3
    assert found["perplexity-1024 loss"]["mean"] == pytest.approx(0.2)


def test_results_of_a_single_method(kvq, fails, folder):
    own = folder / "kivi-2bit,residual=64"
    own.mkdir()
    methods = json.loads((folder / "comparison.json").read_text())["methods"]
    (own / "results.json").write_text(json.dumps(methods["b-2bit"]))
    lines = kvq("results", own, "--format", "csv").stdout.splitlines()
    assert len(lines) == 2 and lines[1].startswith('"kivi-2bit,residual=64",33.3')
    (own / "results.json").write_text("[]")
    fails("results", own, code=1, says="results.json: not the result of an evaluation")
    for damage in ({"n-samples": {"vt": 3}}, {"higher_is_better": None}, {"config": {"method": "kivi"}}):
        (own / "results.json").write_text(json.dumps({**methods["b-2bit"], **damage}))
        fails("results", own, code=1, says="not the result of an evaluation; delete it, and run the evaluation again")


def test_folder_without_evaluation_is_an_error(kvq, fails, folder):
    fails("results", folder / "gone", code=1, says="give the folder that `kvq eval` wrote to")
    (folder / "comparison.json").write_text("[1]")
    fails("results", folder, code=1, says="not the result of an evaluation")
    (folder / "comparison.json").write_text("{")
    fails("results", folder, code=1, says="not JSON")

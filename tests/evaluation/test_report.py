"""`kvq report` of a tiny evaluation: numbers, intervals and n of the page are those of the result files."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil

import numpy as np
import pytest
from html_pages import loaded_urls, read_page

from kvq_cli.report.sources import find_results

HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>'


@pytest.fixture(scope="module")
def evaluated(loaded, tmp_path_factory):
    """Perplexity of a random model on three windows, with four caches."""
    from kvq_cli.evaluation.compared_methods import compared_methods
    from kvq_cli.evaluation.runner import evaluate
    from kvq_cli.evaluation.settings import EvaluationSettings
    from kvq_cli.methods.registry import build

    out = tmp_path_factory.mktemp("evaluated")
    compared = [build("fp16"), build("kivi", bits=4), build("kivi", bits=2), build("innerq", bits=2, recent=32)]
    evaluate(loaded, compared_methods(compared), EvaluationSettings(["perplexity"], samples=3, seqlens=[384]), out)
    return out


@pytest.fixture
def folder(evaluated, tmp_path):
    # Without records of runs, which comparison.json could not replace.
    return shutil.copytree(evaluated, tmp_path / "tiny", ignore=shutil.ignore_patterns("runs"))


@pytest.fixture
def page(kvq, folder):
    found = kvq("report", folder, "--json")
    assert found.exit_code == 0, found.stderr
    assert json.loads(found.stdout) == {"page": str(folder / "report.html")}
    return (folder / "report.html").read_text(encoding="utf-8")


def methods_of(folder):
    return json.loads((folder / "comparison.json").read_text())["methods"]


def test_scores_have_standard_errors_and_n(page, folder):
    rows = read_page(page).rows("Scores")
    methods = methods_of(folder)
    assert list(rows) == list(methods) and len(rows) == 4
    for label, document in methods.items():
        results, cache = document["results"]["perplexity"], document["cache"]["perplexity-384"]
        for title, metric, digits, scale in (
            ("perplexityn = 3", "perplexity", 3, 1),
            ("KL to fp16n = 3", "kl", 5, 1),
            ("top-1n = 3", "top1", 1, 100),
        ):
            value, error = scale * results[f"{metric},none"], scale * results[f"{metric}_stderr,none"]
            assert rows[label][title].value == pytest.approx(value, rel=5e-9)  # sort keys have 9 digits
            assert rows[label][title].text == f"{value:.{digits}f} ±{error:.{digits}f}"
        assert rows[label]["measured bits"].value == pytest.approx(cache["measured_bits"], rel=5e-9)


def test_paired_differences_have_intervals_and_n(page, folder):
    """As scipy computes them from the sample files."""
    from scipy.stats import ttest_rel

    methods = methods_of(folder)

    def losses(label):
        lines = (folder / methods[label]["samples"]["perplexity-384"]).read_text().splitlines()[1:]
        records = sorted(map(json.loads, lines), key=lambda record: record["index"])
        return [record["nll"] / record["tokens"] for record in records]

    rows = read_page(page).rows("Paired differences to kivi-4bit")
    assert list(rows) == ["fp16", "kivi-2bit", "innerq-2bit"]
    for label, cells in rows.items():
        cell = cells["perplexity-384 lossn = 3"]
        low, high = ttest_rel(losses(label), losses("kivi-4bit")).confidence_interval(0.95)
        mean, *interval = map(float, re.findall(r"[-+][\d.e-]+", cell.text))
        assert cell.value == pytest.approx(np.subtract(losses(label), losses("kivi-4bit")).mean())
        assert [mean, *interval] == pytest.approx([cell.value, low, high], rel=1e-3)


def test_points_are_placed_by_bits_and_logarithm_of_the_score(page, folder):
    """Pixels are affine in measured bits and in log KL."""
    first = page[page.index('<svg viewBox="0 0 400') :].partition("</svg>")[0]
    pixels = re.findall(r'transform="translate\(([\d.]+) ([\d.]+)\)"', first)
    tips = re.findall(r"<title>(\S+): ", first)
    methods = methods_of(folder)
    assert sorted(tips) == ["innerq-2bit", "kivi-2bit", "kivi-4bit"]
    bits = [methods[label]["cache"]["perplexity-384"]["measured_bits"] for label in tips]
    scores = [math.log(methods[label]["results"]["perplexity"]["kl,none"]) for label in tips]
    for data, axis, sign in ((bits, 0, 1), (scores, 1, -1)):
        line = np.polyfit(data, [float(pixel[axis]) for pixel in pixels], 1)
        assert sign * line[0] > 0
        assert np.polyval(line, data) == pytest.approx([float(pixel[axis]) for pixel in pixels], abs=0.11)


def test_page_loads_nothing(page):
    assert loaded_urls(page) == []
    assert "://" not in page
    metas = [attributes for tag, attributes in read_page(page).elements if tag == "meta"]
    [policy] = [each["content"] for each in metas if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'")


def test_text_of_results_is_escaped(kvq, folder):
    document = json.loads((folder / "comparison.json").read_text())
    document["methods"][HOSTILE] = document["methods"].pop("kivi-2bit")
    for one in document["methods"].values():
        one["config"]["model_args"]["name"] = HOSTILE
        one["config"]["settings"]["datasets"] = [HOSTILE]
    (folder / "comparison.json").write_text(json.dumps(document))
    (folder / "target.json").write_text(json.dumps({"command": ["kvq", "eval", HOSTILE]}))
    (folder / "claims.md").write_text(f"| a | b |\n| --- | --- |\n| {HOSTILE} | 1 |\n")
    (folder / "other.json").write_text(json.dumps({"study": HOSTILE, HOSTILE: [{HOSTILE: HOSTILE}]}))
    assert kvq("report", folder).exit_code == 0
    page = read_page((folder / "report.html").read_text(encoding="utf-8"))
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == 1 and "img" not in tags
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert page.text.count("<script>alert(1)</script>") > 10
    assert HOSTILE in page.rows("Scores")


def test_commands_of_runs_are_shown(kvq, folder):
    document = json.loads((folder / "comparison.json").read_text())
    for index, one in enumerate(document["methods"].values()):
        one["config"]["run"] = {
            "id": 1 + index // 2,
            "time": "2026-01-02T03:04:05+00:00",
            "command": f"kvq eval {index // 2}",
        }
    (folder / "comparison.json").write_text(json.dumps(document))
    assert kvq("report", folder, "--out", "page.html", "--quiet").exit_code == 0
    text = read_page((folder.parent / "page.html").read_text(encoding="utf-8")).text
    assert "Run 2, 2026-01-02T03:04:05+00:00: kivi-2bit, innerq-2bit" in text
    assert "kvq eval 0" in text and "kvq eval 1" in text


def test_without_samples_the_page_says_why_differences_are_missing(kvq, fails, folder):
    for path in folder.rglob("*.jsonl"):
        path.unlink()
    for options in ([], ["--baseline", "kivi-4bit"]):
        assert kvq("report", folder, *options).exit_code == 0
        assert "run the evaluation again to compare samples" in (folder / "report.html").read_text()
    fails("report", folder, "--baseline", "kivi", code=2, says="must name one of kivi-4bit, kivi-2bit")


def test_stored_differences_are_shown(kvq, folder):
    for path in folder.rglob("*.jsonl"):
        path.unlink()
    stored = {"mean": 0.25, "low": 0.125, "high": 0.375, "samples": 9}
    differences = {"baseline": "kivi-4bit", "methods": {"kivi-2bit": {"perplexity loss": stored}}}
    (folder / "differences.json").write_text(json.dumps(differences))
    assert kvq("report", folder).exit_code == 0
    cell = read_page((folder / "report.html").read_text()).rows("Paired differences to kivi-4bit")["kivi-2bit"]
    assert cell["perplexity lossn = 9"].text == "+0.25 [+0.125, +0.375] *"


def test_links_out_of_the_folder_are_not_followed_into_the_page(kvq, tmp_path):
    (tmp_path / "in").mkdir()
    for name in ("a", "b"):
        (tmp_path / "in" / f"{name}.json").write_text("{}")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "in" / "figure").write_text("figure")
    (tmp_path / "in" / "a.png").symlink_to(tmp_path / "secret")
    (tmp_path / "in" / "b.png").symlink_to("figure")
    (tmp_path / "in" / "claims.md").symlink_to(tmp_path / "secret")
    assert kvq("report", "in").exit_code == 0
    page = (tmp_path / "in" / "report.html").read_text()
    figure, secret = (base64.b64encode(text).decode() for text in (b"figure", b"secret"))
    assert figure in page and secret not in page
    assert find_results(tmp_path / "in")[0].claims == ""


def test_bad_folders_are_one_line(fails, folder, tmp_path):
    fails("report", tmp_path / "gone", code=1, says="gone: no such folder")
    (tmp_path / "empty").mkdir()
    fails("report", tmp_path / "empty", code=1, says="no results here")
    fails("report", folder, "--artifact", "nowhere", code=1, says="no artifact at nowhere")
    (tmp_path / "taken").write_text("")
    fails("report", folder, "--out", "taken/page.html", code=1, says="choose another --out")
    (folder / "comparison.json").write_text("{")
    fails("report", folder, code=1, says="not JSON")
    assert not (folder / "report.html").exists()

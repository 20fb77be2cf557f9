"""Pages of artifacts, studies and benchmarks."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path

import pytest
from html_pages import loaded_urls, read_page

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "results" / "reproduction" / "smollm2"


def report(kvq, folder, *options):
    found = kvq("report", folder, "--out", "page.html", *options)
    assert found.exit_code == 0, found.stderr
    html = Path("page.html").read_text(encoding="utf-8")
    assert loaded_urls(html) == []
    return read_page(html)


def test_errors_of_artifacts_by_layer(kvq, tmp_path):
    (tmp_path / "bits.json").write_text("[]")
    folders = [ROOT / "artifacts" / "reference" / name for name in ("temporalkv-2bit", "xquant")]
    page = report(kvq, tmp_path, *(word for folder in folders for word in ("--artifact", folder)))
    calibrated, factored = (json.loads((folder / "config.json").read_text())["errors"]["layers"] for folder in folders)
    [head, *rows] = page.tables["temporalkv-2bit: errors of each layer"]
    assert len(rows) == 2 * len(calibrated) + 2  # the last ones are means
    fisher = [cell.text for cell in head].index("fisher")
    for layer, errors in enumerate(calibrated):
        for row, kind in zip(rows[2 * layer : 2 * layer + 2], ("k", "v"), strict=True):
            assert row[fisher].value == pytest.approx(errors[kind]["chosen"]["fisher"], rel=1e-8)
    residuals = [row[3].value for row in page.tables["xquant: errors of each layer"][1:]]
    expected = [factor["residual"] for layer in factored for factor in layer.values()]
    assert residuals == pytest.approx(expected, rel=1e-8)


def test_artifact_of_another_checksum_is_not_shown(kvq, tmp_path, monkeypatch):
    """The default folder may hold a newer artifact than the one that was evaluated."""
    methods = json.loads((ROOT / "results/reproduction/reference/compare-fair/comparison.json").read_text())["methods"]
    document = methods["temporalkv-2bit"]
    document["results"] = {"perplexity": document["results"]["perplexity"]}  # a few plots instead of many
    document["config"]["method"] = json.loads((ROOT / "artifacts/reference/temporalkv-2bit/config.json").read_text())[
        "method"
    ]
    checksum = json.loads((ROOT / "artifacts/reference/temporalkv-2bit/config.json").read_text())["checksum"]
    (tmp_path / "artifacts").symlink_to(ROOT / "artifacts")
    for digest, shown in ((checksum, True), ("0" * 64, False)):
        document["config"]["artifact"] = digest
        (tmp_path / "comparison.json").write_text(json.dumps({"methods": {"temporalkv-2bit": document}}))
        page = report(kvq, tmp_path)
        assert ("temporalkv-2bit: errors of each layer" in page.tables) is shown
        assert "temporalkv-2bit: errors of each layer" not in report(kvq, tmp_path, "--no-errors").tables
    found = kvq("report", tmp_path, "--no-errors", "--artifact", ROOT / "artifacts/reference/temporalkv-2bit")
    assert found.exit_code == 2 and "use one" in found.stderr


def test_benchmark(kvq, tmp_path):
    spread = {"p20": 1.5, "p50": 2.25, "p80": 3.0, "n": 12}
    rows = [
        {"peer": peer, "context": context, "batch": 1, "token_ms": spread, "cache_bytes": context * 1024}
        for peer in ("plain", "kvq kivi-2bit")
        for context in (128, 256, 512)
    ]
    machine = {"device": "a <GPU>", "versions": {"torch": "2.13.0"}}
    document = {"bench": "generate", "machine": machine, "model": "reference", "rounds": 4, "rows": rows}
    (tmp_path / "generate.json").write_text(json.dumps(document))
    page = report(kvq, tmp_path)
    [head, *shown] = page.tables["generate"]
    column = [cell.text for cell in head].index("token_ms")
    assert [row[column].text for row in shown] == ["2.25 [1.5, 3], n = 12"] * 6
    assert sum(attributes.get("class") == "plot" for _, attributes in page.elements) == 2
    assert "a <GPU>" in page.text and "torch=2.13.0" in page.text


def test_folder_of_several_results(kvq, tmp_path):
    """A section per study and comparison; tables as in the result files."""
    folder = tmp_path / "several"
    for name in ("study-rank", "sizes", "table-squat-1"):
        shutil.copytree(ROOT / "results" / "reproduction" / "reference" / name, folder / name)
    study = json.loads((folder / "study-rank" / "rank.json").read_text())
    (folder / "study-rank" / "rank.png").write_bytes(b"a picture")
    page = report(kvq, folder)
    [picture] = [attributes for tag, attributes in page.elements if tag == "img"]
    assert picture["src"] == f"data:image/png;base64,{base64.b64encode(b'a picture').decode()}"
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    ids = {attributes.get("id") for _, attributes in page.elements}
    assert len(links) == 3 and all(link[1:] in ids for link in links)
    tables = page.tables["study-rank"]
    assert [cell.text for cell in tables[0]] == study["columns"] and len(tables) == len(study["rows"]) + 1


def test_baseline_of_some_of_several_results(kvq, tmp_path):
    """A folder without the method says so; UsageError where no folder has it."""
    folder = tmp_path / "several"
    shutil.copytree(SMOLLM2 / "table-xquant-1", folder / "with")
    shutil.copytree(SMOLLM2 / "perplexity-innerq-modes", folder / "without")
    files = {name: folder / name / "comparison.json" for name in ("with", "without")}
    methods = {name: json.loads(file.read_text())["methods"] for name, file in files.items()}
    baseline = next(label for label in methods["with"] if label not in methods["without"])
    text = report(kvq, folder, "--baseline", baseline).text
    assert text.count(f"Not computed: --baseline {baseline}: must name one of") == 1
    refused = kvq("report", folder, "--out", "page.html", "--baseline", "gone-2bit")
    assert refused.exit_code == 2 and "gone-2bit" in refused.stderr


def test_scores_of_pairs_are_no_section(kvq, tmp_path):
    """Verdicts on claims are computed from them."""
    folder = tmp_path / "one"
    shutil.copytree(SMOLLM2 / "table-xquant-1", folder)
    assert (folder / "scores.json").is_file()
    shown = report(kvq, folder).text
    (folder / "scores.json").unlink()
    assert report(kvq, folder).text == shown

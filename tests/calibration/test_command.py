"""The commands `kvq calibrate` and `kvq inspect`."""

import io
import json
import os
import shutil
import signal
import threading
import time

import pytest
import rich.console
import rich.progress
from random_artifacts import random_parts, tiny_model

from kvq_cli.artifact import load_artifact, save_artifact
from kvq_cli.calibration import plot
from kvq_cli.methods.registry import build

SMALL = ["--samples", 6, "--seqlen", 100, "--gradients", 4, "--points", 300, "--iterations", 3]


@pytest.fixture
def calibrate(kvq, tiny_folder):
    """`calibrate("--bits", 4)` runs `kvq calibrate` on the tiny model with settings that take a second."""
    return lambda *more: kvq("calibrate", "--model", tiny_folder, "--device", "cpu", *SMALL, *more)


@pytest.fixture(scope="module")
def artifact(tiny_folder, tmp_path_factory):
    from typer.testing import CliRunner

    from kvq_cli.cli.app import app

    out = tmp_path_factory.mktemp("artifacts") / "a"
    words = ["calibrate", "--model", tiny_folder, "--device", "cpu", *SMALL, "--set", "hybrid=head", "--out", out]
    assert CliRunner().invoke(app, [str(w) for w in words], prog_name="kvq").exit_code == 0
    return out


def test_calibrate_writes_to_the_default_folder(calibrate, tmp_path):
    result = calibrate("--bits", 4)
    assert result.exit_code == 0, result.output
    found = load_artifact(tmp_path / "artifacts" / "tiny" / "temporalkv-4bit")
    assert found.config["method"]["bits"] == 4
    assert "error on held-out text, Fisher-weighted: keys 0." in result.stdout
    again = calibrate("--bits", 4, "--resume")
    assert again.stdout == result.stdout and "does not record" not in again.stderr
    older = {key: value for key, value in found.config.items() if key not in ("inputs", "files", "checksum")}
    save_artifact(found.path, older, found.tensors, "card", overwrite=True)
    assert "4bit does not record the text and the weights" in calibrate("--bits", 4, "--resume").stderr


@pytest.mark.parametrize(("method", "bits"), [("kvquant", 3), ("channelkv", 4)])
def test_dry_run_calibrate_and_inspect_of_other_methods(calibrate, kvq, method, bits):
    report = json.loads(calibrate("--method", method, "--bits", bits, "--dry-run", "--json").stdout)
    result = calibrate("--method", method, "--bits", bits)
    assert result.exit_code == 0, result.output
    found = load_artifact(f"artifacts/tiny/{method}-{bits}bit")
    assert found.method_config["name"] == method and found.method_config["bits"] == bits
    assert found.config["sizes"]["total"] == report["artifact_bytes"]
    shown = kvq("inspect", f"artifacts/tiny/{method}-{bits}bit").stdout
    assert method in shown and all(kind in shown for kind in found.config["sizes"])


def test_json_output_is_one_document(calibrate):
    result = calibrate("--json", "--out", "a", "--no-fisher", "--set", "sinks=4")
    document = json.loads(result.stdout)
    assert document["artifact"] == "a" and document["digest"] == load_artifact("a").digest
    assert document["method"]["fisher"] is False and document["method"]["sinks"] == 4


def test_options_from_a_config_file(calibrate, tmp_path):
    (tmp_path / "c.yaml").write_text("bits: 1\nset: {hybrid: 'off'}\nseed: 3\nout: here\n")
    assert calibrate("--config", tmp_path / "c.yaml").exit_code == 0
    config = load_artifact("here").config
    assert (config["method"]["bits"], config["method"]["hybrid"], config["calibration"]["seed"]) == (1, "off", 3)


def test_dry_run_prints_tensors_bytes_and_memory_and_writes_nothing(calibrate, tmp_path):
    result = calibrate("--dry-run", "--set", "outliers=0.05")
    assert result.exit_code == 0 and os.listdir(tmp_path) == []
    for text in ("layers.*.k.centroids.<shape>", "2x2x256x4", "layers.*.v.upper", "memory", "disk", "artifact"):
        assert text in result.stdout
    document = json.loads(calibrate("--dry-run", "--json").stdout)
    assert document["artifact_bytes"] == sum(tensor["bytes"] for tensor in document["tensors"])
    assert document["memory_bytes"] > 0 and document["captured_bytes"] == (6 + 4) * 92 * 2 * 2 * 16 * 2


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        (["--bits", 3], 2, "bits=3 is not one of 1, 2, 4 (an 8-bit code stands for 8, 4 or 2 numbers)"),
        (["--method", "nonsense"], 2, "unknown method 'nonsense'"),
        (["--method", "kivi"], 2, "kivi needs no calibration"),
        (["--set", "chunks=2"], 2, "no option 'chunks'"),
        (["--set", "share=3"], 2, "share=3 does not divide head_dim=8"),
        (["--dataset", "nonsense"], 2, "no dataset 'nonsense'"),
        (["--dataset", "wikitext2"], 1, "without a network use prose, pydoc, self, or a .txt"),
        (["--samples", 50000, "--gradients", 4], 1, "tokens found, 5,000,000 needed"),
        (["--seqlen", 257], 2, "--seqlen 257 is more than the 256 tokens"),
        (["--disk", "nan"], 2, "--disk must be above 0"),
        (["--disk", "inf"], 2, "--disk must be above 0"),
        (["--gradients", 7], 2, "--gradients 7 must be"),
        (["--model", "no/such/model"], 1, "no/such/model"),
        (["--out", "/proc/kvq/a"], 1, "cannot write /proc/kvq"),
        (["--out", "taken"], 2, "taken exists already: choose another --out, or pass --force"),
    ],
)
def test_bad_requests_end_with_one_line(fails, tiny_folder, tmp_path, flags, code, says):
    (tmp_path / "taken").mkdir()
    fails("calibrate", "--model", tiny_folder, *SMALL, "--quiet", *flags, code=code, says=says)
    assert os.listdir(tmp_path) == ["taken"]


def test_each_phase_has_a_progress_bar_with_its_total(calibrate, monkeypatch):
    bars = []

    def progress(self):
        bars.append(rich.progress.Progress(console=rich.console.Console(file=io.StringIO()), disable=True))
        return bars[0]

    monkeypatch.setattr("kvq_cli.cli.output.Output.progress", progress)
    assert calibrate().exit_code == 0
    tasks = [(task.description, task.completed, task.total) for task in bars[0].tasks]
    assert tasks == [("read text", 1, 1), ("capture", 6, 6), ("cluster", 4, 4), ("write", 1, 1)]


@pytest.mark.usefixtures("default_sigint")
def test_ctrl_c_tells_how_to_resume(calibrate, tmp_path):
    progress = tmp_path / "a.work" / "captured.json"

    def interrupt() -> None:
        deadline = time.monotonic() + 120
        while not progress.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    watch = threading.Thread(target=interrupt)
    watch.start()
    result = calibrate("--samples", 60, "--out", "a")
    watch.join()
    assert result.exit_code == 130, result.output
    said = result.stderr
    assert "interrupted; continue with the same command and --resume" in said and "Traceback" not in said
    assert not (tmp_path / "a").exists()
    assert json.loads(progress.read_text())["samples"] < 60
    assert calibrate("--samples", 60, "--out", "a", "--resume").exit_code == 0
    assert not (tmp_path / "a.work").exists()


def test_inspect_prints_method_data_sizes_and_errors(kvq, artifact):
    result = kvq("inspect", artifact)
    config = load_artifact(artifact).config
    assert result.exit_code == 0, result.output
    for text in (
        "temporalkv",
        "hybrid=head",
        "2 kv heads of 8",
        "prose, 6 samples of 100 tokens",
        "k.centroids",
        "total",
    ):
        assert text in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if " keys " in line or " values " in line]
    assert len(rows) == 6
    for row, (layer, kind) in zip(rows[:4], [(0, "k"), (0, "v"), (1, "k"), (1, "v")], strict=True):
        measured = config["errors"]["layers"][layer][kind]
        numbers = [measured["chosen"]["fisher"], measured["chosen"]["plain"]]
        numbers += [shape["fisher"] for shape in measured["shapes"].values()] + [measured["adjacent_token_correlation"]]
        assert [float(word) for word in row[-5:]] == pytest.approx(numbers, rel=1e-3)
        assert set(row[2:-5]) == set(measured["choice"])


def test_inspect_as_json_and_as_a_plot(kvq, artifact, tmp_path):
    result = kvq("inspect", artifact, "--json", "--plot", "a.png")
    document = json.loads(result.stdout)
    assert document["errors"] == load_artifact(artifact).config["errors"]
    image = (tmp_path / "a.png").read_bytes()
    assert image.startswith(b"\x89PNG") and len(image) > 10_000
    assert kvq("inspect", artifact, "--plot", "a.svg").exit_code == 0


@pytest.mark.parametrize(
    ("keys", "values", "lines", "rows"),
    [
        ("klt-2bit temporalkv-2bit", "kivi-4bit:group=8 fp16", {"chosen"}, 1),
        ("klt-2bit", "klt-4bit", {"chosen"}, 2),
        ("temporalkv-2bit", "temporalkv-2bit temporalkv-4bit", {"chosen", "temporal", "channel"}, 2),
    ],
)
def test_the_plot_of_a_mixed_artifact_has_what_all_its_streams_have(
    kvq, tmp_path, monkeypatch, keys, values, lines, rows
):
    config, tensors = random_parts(build("mixed", bits=16, keys=keys, values=values), tiny_model())
    del config["tuning"]  # as `kvq calibrate --method mixed` writes it
    for layer, errors in enumerate(config["errors"]["layers"]):
        errors["v"]["chosen"] = {**errors["v"]["chosen"], "fisher": 0.5 + layer}
    save_artifact("m", config, tensors, "card")
    drawn = []
    monkeypatch.setattr(plot, "save", lambda figure, path, option: drawn.append(figure))
    result = kvq("inspect", "m", "--plot", "a.png")
    assert result.exit_code == 0, result.output
    axes = drawn[0].axes
    assert len(axes) == 2 * rows
    chosen = {line.get_label(): list(line.get_ydata()) for line in axes[1].lines}
    assert set(chosen) == lines and chosen["chosen"] == [0.5, 1.5]


def test_inspect_refuses_missing_and_damaged_artifacts(fails, artifact, tmp_path):
    fails("inspect", "gone", code=1, says="no artifact at gone")
    fails("inspect", artifact / "config.json", code=1, says=f"is a file: give the artifact's folder, {artifact}")
    fails("inspect", artifact, "--plot", "a.nonsense", code=2, says="--plot a.nonsense: unknown file format")
    fails(
        "inspect",
        artifact,
        "--plot",
        "/dev/null/a.png",
        code=1,
        says="/dev/null/a.png: File exists; choose another --plot",
    )
    broken = tmp_path / "broken"
    shutil.copytree(artifact, broken)
    (broken / "tensors.safetensors").write_bytes((artifact / "tensors.safetensors").read_bytes()[:-1])
    fails("inspect", broken, code=1, says="tensors.safetensors has")

"""Texts that an artifact was calibrated or tuned on."""

from __future__ import annotations

import json

import pytest
from random_artifacts import random_parts
from tiny_folder import tiny, tiny_folder  # noqa: F401  # fixtures

from kvq_cli.artifact import save_artifact
from kvq_cli.data.texts import file_digest
from kvq_cli.evaluation.seen_texts import seen_texts
from kvq_cli.methods.registry import build
from kvq_cli.reference import prose


@pytest.fixture
def files(tmp_path):
    for name in ("one", "copy", "other"):
        (tmp_path / f"{name}.txt").write_text("other" if name == "other" else "one")
    return {name: str(tmp_path / f"{name}.txt") for name in ("one", "copy", "other")}


def test_files_are_compared_by_what_they_hold(files):
    config = {"calibration": {"dataset": files["one"]}, "inputs": {"text": file_digest(files["one"])}}
    seen = seen_texts(config, list(files.values()))
    assert seen == {files["one"]: "calibrated on this text", files["copy"]: "calibrated on this text"}
    config["inputs"]["held_out"] = [file_digest(files["other"]), None]
    assert seen_texts(config, [files["other"]]) == {files["other"]: "tuned on this text"}


def test_splits_of_named_datasets_are_apart_except_where_tuned(files):
    config = {"calibration": {"dataset": "prose"}, "inputs": {"text": None}}
    assert seen_texts(config, ["prose", files["one"]]) == {}
    config["tuning"] = {"text": ["prose"]}
    assert seen_texts(config, ["prose", "pydoc"]) == {"prose": "tuned on this text"}


def test_artifacts_without_calibration_text(files):
    assert seen_texts({}, ["prose", *files.values()]) == {}


def test_eval_warns_and_its_result_says_so(kvq, tiny, tiny_folder, tmp_path):  # noqa: F811
    text = tmp_path / "seen.txt"
    text.write_text(prose("evaluation")[:4000])
    config, tensors = random_parts(build("kvquant", bits=4), tiny.model, str(tiny_folder))
    config["inputs"] = {"text": file_digest(str(text)), "weights": "0" * 64, "results": 2, "device": "cpu"}
    save_artifact(tmp_path / "artifact", config, tensors, "card")
    words = ["--model", tiny_folder, "--task", "perplexity", "--seqlen", 64, "--samples", 1, "--out", "out", "--json"]
    result = kvq("eval", *words, "--artifact", "artifact", "--dataset", f"{text},pydoc")
    assert result.exit_code == 0, result.stderr
    assert f"kvquant-4bit was calibrated on this text: {text}; scores on unseen text are worse" in result.stderr
    assert result.stderr.count("was calibrated on this text") == 1
    assert json.loads(result.stdout)["config"]["seen_texts"] == {str(text): "calibrated on this text"}

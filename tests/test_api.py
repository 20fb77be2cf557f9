"""Commands as functions: the commands' own defaults, checks and results, on models by name and in memory."""

from __future__ import annotations

import json
import re

import pytest
from random_artifacts import random_parts, tiny_model
from tiny_folder import tiny, tiny_folder, write_tiny_model  # noqa: F401  # fixtures

import kvq_cli
from kvq_cli import attach, calibrate, evaluate, load_model, recommend
from kvq_cli.artifact import save_artifact
from kvq_cli.cli import recommend as recommend_command
from kvq_cli.cli.output import Output
from kvq_cli.errors import KvqError, UsageError
from kvq_cli.paths import artifact_folder
from kvq_cli.tuning import recommend as tuning

SMALL = {"samples": 4, "seqlen": 200, "points": 256, "iterations": 2}
WINDOWS = {"seqlen": 64, "samples": 1}
FLAGS = [word for name, value in SMALL.items() for word in (f"--{name}", value)]


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_public_names_are_there_and_nothing_else_is():
    assert all(getattr(kvq_cli, name) is not None for name in kvq_cli.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nosuch'"):
        kvq_cli.nosuch  # noqa: B018


def test_calibrate_is_the_command(tiny, tiny_folder, kvq, capsys):  # noqa: F811
    made = calibrate(str(tiny_folder), "temporalkv-4bit:sinks=4", **SMALL, out="mine")
    assert capsys.readouterr() == ("", "")
    words = ["--method", "temporalkv", "--bits", 4, "--set", "sinks=4", *FLAGS, "--out", "other", "--json"]
    result = kvq("calibrate", "--model", tiny_folder, *words)
    assert json.loads(result.stdout)["digest"] == made.digest, result.stderr
    held = calibrate(tiny.model, "temporalkv-4bit:sinks=4", tokenizer=tiny.tokenizer, **SMALL)
    assert held.path == made.path.__class__("artifacts") / tiny_folder.name / "temporalkv-4bit"
    assert held.digest == made.digest
    with attach(tiny.model, "temporalkv-4bit") as kv:
        assert kv.origin.artifact == made.digest
    with pytest.raises(UsageError, match="exists already: .* pass --force to replace it"):
        calibrate(tiny.model, "temporalkv-4bit:sinks=4", tokenizer=tiny.tokenizer, **SMALL)


def test_evaluate_is_the_command(tiny, tiny_folder, kvq, capsys):  # noqa: F811
    methods = ["fp16", "kivi-2bit:group=8:residual=16"]
    found = evaluate(tiny.model, methods, tokenizer=tiny.tokenizer, **WINDOWS, out="mine")
    assert capsys.readouterr() == ("", "")
    words = ["--seqlen", 64, "--samples", 1, "--out", "other", "--json"]
    result = kvq("eval", "--model", tiny_folder, "--compare", ",".join(methods), *words)
    expected = json.loads(result.stdout)
    assert {label: one["results"] for label, one in found["methods"].items()} == {
        label: one["results"] for label, one in expected["methods"].items()
    }
    assert next(iter(found["methods"].values()))["config"]["run"]["command"] == "kvq_cli.evaluate"
    single = evaluate(str(tiny_folder), kvq_cli.build("kivi", bits=2, group=8, residual=16), **WINDOWS, out="mine")
    assert single["results"] == list(found["methods"].values())[1]["results"]


def test_options_are_checked_as_on_the_command_line(tiny):  # noqa: F811
    held = {"tokenizer": tiny.tokenizer}
    with pytest.raises(UsageError, match=r"calibrate\(\): unknown key 'sample'; valid: captured, damping, "):
        calibrate(tiny.model, "temporalkv", sample=3, **held)
    with pytest.raises(UsageError, match=r"calibrate\(\): Invalid value for '--samples'"):
        calibrate(tiny.model, "temporalkv", samples=1, **held)
    with pytest.raises(UsageError, match="unknown key 'device'"):
        calibrate(tiny.model, "temporalkv", device="cpu", **held)
    with pytest.raises(UsageError, match=r"evaluate\(\): unknown key 'bits'"):
        evaluate(tiny.model, "kivi", bits=2, **held)
    with pytest.raises(UsageError, match="name at least one method"):
        evaluate(tiny.model, [], **held)
    with pytest.raises(UsageError, match="pass the model's tokenizer, too"):
        evaluate(tiny.model, "kivi")
    with pytest.raises(UsageError, match="the model has no name: pass the artifact's folder, out="):
        calibrate(tiny_model(), "temporalkv", **held)
    with pytest.raises(UsageError, match="kivi needs no calibration"):
        calibrate(tiny.model, "kivi", **held)
    with pytest.raises(KvqError, match="temporalkv-2bit needs calibration: run `kvq calibrate "):
        evaluate(tiny.model, "temporalkv-2bit", **held)
    with pytest.warns(UserWarning, match="--templates has no effect: only tasks of RULER read it"):
        evaluate(tiny.model, "kivi:group=8:residual=16", templates="standard", **WINDOWS, **held)


def test_recommend_leaves_out_an_artifact_of_another_model(tiny, tmp_path, capsys):  # noqa: F811
    method = kvq_cli.build("temporalkv", bits=2)
    own = artifact_folder(tiny.name, method)
    save_artifact(own, *random_parts(method, tiny_model()), "card")
    taken = recommend_command._ready(method, tiny, "prose", 0, tmp_path, True, Output())
    said = capsys.readouterr().err
    assert taken is None and re.search("left out: temporalkv: artifact .* belongs to the model", said)


def test_recommend_measures_what_fits(tmp_path, monkeypatch):
    for module, name, value in (
        (tuning, "WINDOWS", 1),
        (tuning, "SEQLEN", 256),
        (tuning, "TIMED_TOKENS", 1),
        (tuning, "ROUNDS", 1),
        (tuning, "LADDERS", (("kivi", (4, 2)),)),
        (recommend_command, "SAMPLES", 3),
    ):
        monkeypatch.setattr(module, name, value)
    wide = load_model(str(write_tiny_model(tmp_path / "wide", head_dim=32)), "cpu")  # groups of 32 numbers fit into it
    weights = sum(parameter.nbytes for parameter in wide.model.parameters())
    with pytest.raises(UsageError, match="the weights take"):
        recommend(wide.model, tokenizer=wide.tokenizer, memory=f"{(2 * 10**9 + weights - 1) / 10**9:.9f}GB")
    found = recommend(wide.model, tokenizer=wide.tokenizer, memory="4GB", context=256)
    assert found["recommended"] == "fp16" and found["compressed"] == "kivi-4bit"
    assert [row["label"] for row in found["methods"]] == ["kivi-4bit"] and found["methods"][0]["kl"] > 0
    assert 'attach(model, "kivi-4bit")' in found["use"]

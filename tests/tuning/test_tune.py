"""`kvq tune` on a tiny model: the artifact, its record and card, resuming, both objectives, wrong requests."""

import json
from pathlib import Path

import pytest
import torch

from kvq_cli import attach
from kvq_cli.artifact import load_artifact
from kvq_cli.artifact.errors import method_of
from kvq_cli.errors import KvqError
from kvq_cli.tuning.search import Search

SMALL = ["--samples", 6, "--seqlen", 100, "--points", 300, "--iterations", 2, "--text", "prose"]
SMALL += ["--windows", 1, "--text-seqlen", 96, "--set", "sinks=2"]
FEW = ["--candidates", "klt:join_keys=on,kivi-4bit:pre_rope=on:group=8,temporalkv-4bit,fp16"]


@pytest.fixture
def tune(kvq, tiny_folder):
    """`tune("--budget", 3)` runs `kvq tune` on the tiny model with settings that take seconds."""
    return lambda *more: kvq("tune", "--model", tiny_folder, "--device", "cpu", *SMALL, *FEW, *more)


def test_the_artifact_is_the_best_that_was_tried_and_works(tune, kvq, tiny, tiny_folder):
    result = tune("--budget", 3, "--swaps", 3, "--out", "a", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    artifact = load_artifact("a")
    tuning = artifact.config["tuning"]
    assert found["digest"] == artifact.digest and found["tuning"] == tuning
    kls = [one["kl"] for one in tuning["tried"]]
    assert tuning["chosen"] == kls.index(min(kls)) and len(kls) > 2
    assert all(one["bits"] <= 3 for one in tuning["tried"])
    assert [point["kl"] for point in tuning["predicted"]] == sorted(
        (p["kl"] for p in tuning["predicted"]), reverse=True
    )
    with torch.no_grad(), attach(tiny.model, artifact) as kv:
        cache = kv.new_cache()
        tiny.model(torch.arange(90)[None], past_key_values=cache)
        assert cache.report().packed_bits == pytest.approx(tuning["tried"][tuning["chosen"]]["bits"])
    card = Path("a/README.md").read_text()
    assert "| klt, by expected loss" in card and "(chosen)" in card and "![KL over bits" in card
    assert Path("a/tuning.png").read_bytes().startswith(b"\x89PNG")
    shown = kvq("inspect", "a", "--plot", "choice.png").stdout
    assert all(method_of(artifact.config, layer, kind) in shown for layer in (0, 1) for kind in "kv")
    assert "tried by kvq tune" in shown
    evaluated = kvq(
        "eval", "--model", tiny_folder, "--task", "perplexity", "--artifact", "a", "--limit", 1, "--seqlen", 64
    )
    assert evaluated.exit_code == 0, evaluated.output


@pytest.mark.slow
def test_calibrating_the_chosen_methods_gives_the_same_tensors(tune, kvq, tiny_folder):
    assert tune("--budget", 2, "--swaps", 0, "--rounds", 1, "--out", "a").exit_code == 0
    tuned = load_artifact("a")
    words = [
        "--method",
        "mixed",
        "--bits",
        2,
        *(f"--set={key}={tuned.method_config[key]}" for key in ("keys", "values")),
    ]
    small = SMALL[: SMALL.index("--text")]
    result = kvq(
        "calibrate", "--model", tiny_folder, "--device", "cpu", *small, *words, "--set", "sinks=2", "--out", "b"
    )
    assert result.exit_code == 0, result.output
    calibrated = load_artifact("b")
    assert calibrated.method_config == tuned.method_config and "tuning" not in calibrated.config
    assert calibrated.tensors.keys() == tuned.tensors.keys()
    assert all(torch.equal(tensor, tuned.tensors[name]) for name, tensor in calibrated.tensors.items())


def test_an_interrupted_search_continues_without_measuring_again(tune, monkeypatch):
    whole = ("--budget", 2.5, "--swaps", 1, "--rounds", 1, "--candidates", "klt:join_keys=on")
    assert tune(*whole, "--out", "whole").exit_code == 0
    measure, measured = Search._kl, []

    def interrupted(self, names):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(names)
        return measure(self, names)

    monkeypatch.setattr(Search, "_kl", interrupted)
    result = tune(*whole, "--out", "a")
    assert result.exit_code == 130 and "continue with the same command and --resume" in result.stderr
    monkeypatch.setattr(Search, "_kl", measure)
    assert tune(*whole, "--out", "a").exit_code == 2  # unfinished work: --resume or --force
    other = tune(*whole, "--budget", 3, "--out", "a", "--resume")
    assert other.exit_code == 2 and "was begun with another tuning" in other.stderr
    assert tune(*whole, "--out", "a", "--resume").exit_code == 0
    assert load_artifact("a").config == load_artifact("whole").config


@pytest.mark.parametrize(("rounding", "fewer"), [(1e-9, False), (7e-3, True), (1.0, True)])
def test_single_streams_are_measured_where_rounding_is_small(tune, monkeypatch, rounding, fewer):
    def loss(search, stream, name):
        bits = search.component(stream, name).nominal_bits
        return 0.0 if name == "fp16" else (1 + stream[0]) * 0.1 * 4**-bits

    def measured(self, names):
        return rounding + sum(loss(self, *item) for item in names.items()), 3.0

    searches = []
    choose = Search._measurable
    monkeypatch.setattr(Search, "_kl", measured)
    monkeypatch.setattr(Search, "_measurable", lambda self, best: searches.append(self) or choose(self, best))
    words = ("--budget", 3, "--candidates", "klt:join_keys=on", "--rounds", 1, "--swaps", 0, "--out", "a")
    assert tune(*words).exit_code == 0
    (search,) = searches
    for stream, (anchor,) in search.alone.items():
        assert anchor.kl == pytest.approx(loss(search, stream, search.klt(anchor.codes)), rel=1e-6)  # without rounding
        at_start = search._codes(stream, search.tried[0].names[stream])
        assert anchor.codes < at_start if fewer else anchor.codes == at_start


@pytest.mark.slow
def test_fewest_bits_within_a_divergence(tune):
    assert tune("--budget", 3, "--rounds", 0, "--swaps", 0, "--out", "a").exit_code == 0
    kl = load_artifact("a").config["tuning"]["tried"][0]["kl"]
    result = tune("--objective", "memory", "--kl", 2 * kl, "--budget", 4, "--swaps", 2, "--out", "b")
    assert result.exit_code == 0, result.output
    tuning = load_artifact("b").config["tuning"]
    chosen = tuning["tried"][tuning["chosen"]]
    assert chosen["kl"] <= 2 * kl
    assert chosen["bits"] == min(one["bits"] for one in tuning["tried"] if one["kl"] <= 2 * kl) < 4


def test_a_divergence_out_of_reach_is_an_error(tune):
    result = tune("--objective", "memory", "--kl", 1e-9, "--budget", 1, "--rounds", 0, "--swaps", 0, "--out", "a")
    assert result.exit_code == 1 and "--kl 1e-09: not reached, the least that was measured is" in result.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--budget", 17], "--budget 17 must be above 0 and at most 16"),
        (["--budget", 0.1], "--budget: 0 bytes a token are too few, the smallest choice takes 4"),
        (["--objective", "memory"], "--objective memory needs --kl"),
        (["--candidates", "kivi"], "the first must be klt without bits"),
        (["--candidates", "klt,xquant"], "--candidates xquant: not one of fp16"),
        (["--set", "bits=3"], "--set bits=...: kvq tune chooses methods; what can be set is sinks, recent, buffer"),
        (["--text-seqlen", 4096], "--text-seqlen 4096 is more than the model's context: give at most 256"),
    ],
)
def test_wrong_requests_say_what_to_change(tune, words, says):
    result = tune(*words)
    assert result.exit_code == 2 and says in result.stderr, result.stderr
    assert not list(Path().glob("artifacts/tiny/*.work"))


def test_records_that_do_not_belong_to_the_artifact_are_refused(tmp_path):
    from random_artifacts import random_parts, tiny_model

    from kvq_cli.artifact import save_artifact
    from kvq_cli.methods.registry import build

    config, tensors = random_parts(build("mixed", bits=4, keys="klt-4bit", values="klt-4bit"), tiny_model())
    tuning = config["tuning"]
    changes = [({"chosen": 0}, "not the method"), ({"chosen": 7}, "below 2"), ({"kl": "low"}, "number or null")]
    for change, says in changes:
        save_artifact(tmp_path / "a", {**config, "tuning": {**tuning, **change}}, tensors, "card", overwrite=True)
        with pytest.raises(KvqError, match=says):
            load_artifact(tmp_path / "a")

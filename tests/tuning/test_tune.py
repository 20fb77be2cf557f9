"""`kvq tune` on a tiny model: the artifact, its record and card, resuming, both objectives, wrong requests."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from random_artifacts import random_parts, tiny_model
from tiny_folder import write_tiny_model

from kvq_cli import attach
from kvq_cli.artifact import load_artifact, save_artifact
from kvq_cli.artifact.errors import method_of
from kvq_cli.calibration import kmeans
from kvq_cli.errors import KvqError
from kvq_cli.evaluation.perplexity import PerplexityEvaluation
from kvq_cli.methods.registry import build
from kvq_cli.reference import prose
from kvq_cli.tuning import run as run_module
from kvq_cli.tuning import search as search_module
from kvq_cli.tuning.measure import Meter
from kvq_cli.tuning.search import Search, Tried
from kvq_cli.tuning.settings import TuneOptions
from kvq_cli.tuning.steps import Steps

SMALL = ["--samples", 6, "--seqlen", 100, "--points", 300, "--iterations", 2, "--text", "prose"]
SMALL += ["--text-samples", 1, "--text-seqlen", 96, "--set", "sinks=2"]
FEW = ["--candidates", "klt:join_keys=on,kivi-4bit:pre_rope=on:group=8,temporalkv-4bit,fp16"]

ONE = ["--candidates", "klt:join_keys=on", "--rounds", 0, "--swaps", 0]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Heads of 32 channels, of which klt takes 1.25 bits and more."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny", head_dim=32)


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
    assert "on other text its KL may be higher" in card
    assert "| klt, by expected loss" in card and "(chosen)" in card and "![KL over bits" in card
    assert Path("a/tuning.png").read_bytes().startswith(b"\x89PNG")
    shown = kvq("inspect", "a", "--plot", "choice.png").stdout
    assert all(method_of(artifact.config, layer, kind) in shown for layer in (0, 1) for kind in "kv")
    assert "tried by kvq tune" in shown
    evaluated = kvq(
        "eval", "--model", tiny_folder, "--task", "perplexity", "--artifact", "a", "--samples", 1, "--seqlen", 64
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


@pytest.mark.slow
def test_an_interrupted_search_continues_without_measuring_again(tune, monkeypatch):
    whole = ("--budget", 2.5, "--swaps", 1, "--rounds", 1, "--candidates", "klt:join_keys=on")
    assert tune(*whole, "--out", "whole").exit_code == 0
    measure, measured = Meter.__call__, []

    def interrupted(self, config, tensors):
        if len(measured) == 3:
            raise KeyboardInterrupt
        measured.append(config["method"])
        return measure(self, config, tensors)

    monkeypatch.setattr(Meter, "__call__", interrupted)
    result = tune(*whole, "--out", "a")
    assert result.exit_code == 130 and "continue with the same command and --resume" in result.stderr

    def counted(self, config, tensors):
        assert config["method"] not in measured
        measured.append(config["method"])
        return measure(self, config, tensors)

    monkeypatch.setattr(Meter, "__call__", counted)
    assert tune(*whole, "--out", "a").exit_code == 2  # unfinished work: --resume or --force
    for words, named in (
        (["--points", 301], "--points:"),
        (["--set", "recent=8"], "--set:"),
        (["--text-seqlen", 90], "--text-seqlen, tokens of --text:"),
    ):
        other = tune(*whole, *words, "--out", "a", "--resume")
        assert other.exit_code == 2 and f"was begun with another {named}" in other.stderr, other.stderr
    assert tune(*whole, "--out", "a", "--resume", "--force").exit_code == 0 and len(measured) > 3  # nothing is lost
    assert load_artifact("a").config == load_artifact("whole").config
    times = Path("a/config.json").stat().st_mtime_ns
    assert tune(*whole, "--out", "a", "--resume").exit_code == 0  # finished: nothing to do
    assert Path("a/config.json").stat().st_mtime_ns == times
    other = tune(*whole, "--budget", 3, "--out", "a", "--resume")
    assert other.exit_code == 2 and "a was made with another --budget: choose another --out" in other.stderr


def test_an_edited_text_is_not_measured_together_with_its_old_one(tune, monkeypatch):
    Path("own.txt").write_text(prose("evaluation")[:20_000])

    def interrupted(self, config, tensors):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Meter, "__call__", interrupted)
        result = tune(*ONE, "--text", "own.txt", "--dataset", "own.txt", "--out", "a")
    assert result.exit_code == 130 and "warning: --text own.txt is the text of --dataset" in result.stderr
    Path("own.txt").write_text(prose("calibration")[:20_000])
    other = tune(*ONE, "--text", "own.txt", "--dataset", "own.txt", "--out", "a", "--resume")
    assert other.exit_code == 2 and "begun with another tokens of --text" in other.stderr


def test_a_finished_artifact_of_an_edited_text_is_not_returned(tune):
    Path("own.txt").write_text(prose("evaluation")[:20_000])
    words = (*ONE, "--text", "own.txt", "--out", "a")
    assert tune(*words).exit_code == 0
    again = tune(*words, "--resume")
    assert again.exit_code == 0 and "does not record" not in again.stderr
    Path("own.txt").write_text(prose("evaluation")[20_000:40_000])
    other = tune(*words, "--resume")
    assert other.exit_code == 2 and "a was made with another text of --text: choose another --out" in other.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("rounding", "fewer"), [(1e-9, False), (7e-3, True), (1.0, True)])
def test_single_streams_are_measured_where_rounding_is_small(tune, monkeypatch, rounding, fewer):
    def loss(search, stream, name):
        bits = search.steps._component(stream, name).nominal_bits
        return 0.0 if name == "fp16" else (1 + stream[0]) * 0.1 * 4**-bits

    def measured(self, names):
        return rounding + sum(loss(searches[0], *item) for item in names.items()), 3.0

    searches = []
    run = Search.run
    monkeypatch.setattr(Steps, "kl", measured)
    monkeypatch.setattr(Search, "run", lambda self: searches.append(self) or run(self))
    words = ("--budget", 3, "--candidates", "klt:join_keys=on", "--rounds", 1, "--swaps", 0, "--out", "a")
    assert tune(*words).exit_code == 0
    (search,) = searches
    at_start = {stream: item.rate for stream, item in search.tried[0].choice.items()}
    for stream, (anchor,) in search.alone.items():
        assert anchor.kl == pytest.approx(
            loss(search, stream, search.klt(stream, anchor.rate)), rel=1e-6
        )  # without rounding
        assert anchor.rate <= at_start[stream]
    measured_at = {stream: anchor.rate for stream, (anchor,) in search.alone.items()}
    assert sum(measured_at.values()) < sum(at_start.values()) if fewer else measured_at == at_start


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


@pytest.mark.slow
def test_a_divergence_out_of_reach_is_an_error_and_a_higher_one_goes_on_from_it(tune, monkeypatch):
    result = tune(*ONE, "--objective", "memory", "--kl", 1e-9, "--budget", 1, "--out", "a")
    assert result.exit_code == 1 and "--kl 1e-09: not reached, the least that was measured is" in result.stderr
    assert "raise --kl or --rounds, and continue with --out a --resume" in result.stderr
    monkeypatch.setattr(Meter, "__call__", None)  # nothing is measured again
    result = tune(*ONE, "--objective", "memory", "--kl", 100, "--budget", 1, "--out", "a", "--resume")
    assert result.exit_code == 0, result.output
    assert load_artifact("a").config["tuning"]["kl"] == 100


def test_of_equal_bits_the_lower_divergence_is_better():
    search = SimpleNamespace(options=TuneOptions("memory", kl=0.1))
    worse, better, fewer, above = (Tried("", {}, *x) for x in ((2.0, 0.09), (2.0, 0.08), (1.9, 0.1), (1.5, 0.11)))
    assert Search._better(search, worse, better) is better
    assert Search._better(search, better, fewer) is fewer
    assert Search._better(search, fewer, above) is fewer


@pytest.mark.slow
@pytest.mark.parametrize(("minutes", "tried", "alone"), [(3, 1, 0), (5.5, 2, 1)])
def test_when_time_is_over_nothing_but_a_last_choice_is_measured(tune, monkeypatch, minutes, tried, alone):
    measure, calls = Meter.__call__, []

    def counted(self, config, tensors):
        calls.append(config)
        kl, bits = measure(self, config, tensors)
        return (20 * kl if len(calls) == 3 else kl), bits  # of the first stream alone, so that another choice is better

    monkeypatch.setattr(Meter, "__call__", counted)
    monkeypatch.setattr(Steps, "error", None)  # the first round's time is over before candidates are compared
    monkeypatch.setattr(search_module, "time", SimpleNamespace(monotonic=lambda: 60.0 * len(calls)))
    result = tune("--budget", 2, "--minutes", minutes, "--out", "a")
    assert result.exit_code == 0, result.output
    tuning = load_artifact("a").config["tuning"]
    assert len(tuning["tried"]) == tried and [len(anchors) for anchors in tuning["alone"]] == 4 * [alone]
    assert len(calls) == (4 if tried == 1 else 7)  # the start, rounding, two or four streams, the choice


def test_fp16_costs_the_bytes_of_the_models_dtype(tune, monkeypatch):
    searches = []
    run = Search.run
    monkeypatch.setattr(Search, "run", lambda self: searches.append(self) or run(self))
    words = ["--candidates", "klt:join_keys=on,fp16", "--rounds", 1, "--swaps", 0, "--dtype", "float16"]
    assert tune(*words, "--budget", 3, "--out", "a").exit_code == 0
    (search,) = searches
    assert {search.steps.error(stream, "fp16") for stream in search.streams} == {(0.0, 2 * 2 * 32)}


def test_blocks_longer_than_the_units_of_captured_tokens(tune):
    words = ["--candidates", "klt:join_keys=on,kvquant-4bit", "--rounds", 1, "--swaps", 0, "--budget", 3]
    result = tune(*words, "--seqlen", 90, "--out", "a")  # 88 tokens, 2 blocks of 32
    assert result.exit_code == 0, result.output


def test_a_divergence_that_is_no_number_is_refused(tune, monkeypatch):
    record = PerplexityEvaluation.record
    monkeypatch.setattr(PerplexityEvaluation, "record", lambda *a: {**record(*a), "kl": float("nan")})
    result = tune(*ONE, "--budget", 3, "--out", "a")
    assert result.exit_code == 1 and "is nan: the model leaves the range of its dtype" in result.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--budget", 17], "--budget 17 must be above 0 and at most 16"),
        (["--budget", 0.1], "--budget: 3 bytes a token are too few, the smallest choice takes 30"),
        (["--objective", "memory"], "--objective memory needs --kl"),
        (["--candidates", "kivi"], "the first must be klt without bits"),
        (["--candidates", "klt,xquant"], "--candidates xquant: not one of fp16"),
        (["--set", "bits=3"], "--set bits=...: kvq tune chooses methods; what can be set is sinks, recent, buffer"),
        (["--text-seqlen", 4096], "--text-seqlen 4096 is more than the model's context: give at most 256"),
        (["--text-seqlen", 8], "klt:join_keys=on: compresses no keys of 7 tokens, all are within its full-precision"),
        (
            ["--set", "recent=90"],
            "--seqlen 100: predictions read the newest 98 and the first 2 tokens in full precision",
        ),
        (["--set", "recent=90", "--seqlen", 200], "raise --text-seqlen, or set smaller windows with --set"),
        (["--text-samples", 100_000], "--text-samples 100000: prose has "),
        (
            ["--candidates", "klt,kvquant-2bit", "--seqlen", 30, "--samples", 40],
            "none reads a packed token: raise it to 44 or more",
        ),
        (["--candidates", "klt:join_keys=on,kivi-2bit:group=8:sinks=8"], "set sinks once for all streams"),
        (["--candidates", "klt,channelkv-1bit:entries=65536"], "chunks of 16 numbers, 8 at most: use bits=2 or 4"),
        (["--candidates", "klt,temporalkv-2bit:share=3"], "share=3 does not divide head_dim=32"),
        (["--candidates", "klt,klt:join_keys=on"], "only the first has any bits: give its own, such as klt-4bit"),
        (["--candidates", "klt,kivi-2bit:group=64"], "--candidates kivi-2bit:group=64: "),
    ],
)
def test_wrong_requests_say_what_to_change(tune, monkeypatch, words, says):
    monkeypatch.setattr(run_module, "capture_all", None)  # they are refused before
    result = tune(*words)
    assert result.exit_code == 2 and says in result.stderr, result.stderr
    assert not list(Path().glob("artifacts/tiny/*.work"))


def test_a_missing_package_is_noticed_before_the_model_runs(tune, monkeypatch):
    monkeypatch.setattr(run_module, "capture_all", None)
    monkeypatch.setattr(kmeans, "find_spec", lambda name: None)
    result = tune("--candidates", "klt,channelkv-2bit:entries=65536", "--samples", 800)
    assert result.exit_code == 1 and "65,536 entries needs the package faiss" in result.stderr, result.stderr
    assert not list(Path().glob("artifacts/tiny/*.work"))


def test_uncompressed_logits_are_kept_on_the_cpu(tiny, monkeypatch):
    config, tensors = random_parts(build("mixed", bits=4, keys="klt-4bit", values="klt-4bit"), tiny.model)
    windows = torch.randint(3, 300, (2, 60), generator=torch.Generator().manual_seed(0))
    expected, computed = Meter(tiny, windows)(config, tensors), []
    logits = PerplexityEvaluation.reference_logits

    def on_a_device(self, loaded, index):
        computed.append(index)
        on_cpu = logits(self, loaded, index)
        return SimpleNamespace(cpu=lambda: on_cpu)

    monkeypatch.setattr(PerplexityEvaluation, "reference_logits", on_a_device)
    meter = Meter(tiny, windows)
    assert meter(config, tensors) == meter(config, tensors) == expected and computed == [0, 1]


def test_records_that_do_not_belong_to_the_artifact_are_refused(tmp_path):
    config, tensors = random_parts(build("mixed", bits=4, keys="klt-4bit", values="klt-4bit"), tiny_model())
    tuning = config["tuning"]
    changes = [({"chosen": 0}, "not the method"), ({"chosen": 7}, "below 2"), ({"kl": "low"}, "number or null")]
    for change, says in changes:
        with pytest.raises(KvqError, match=says):
            save_artifact(tmp_path / "a", {**config, "tuning": {**tuning, **change}}, tensors, "card")

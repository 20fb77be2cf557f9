"""`kvq bench generate --grow`, and synthetic artifacts and text."""

from __future__ import annotations

import gc
import json
from collections import defaultdict
from contextlib import contextmanager
from weakref import ref

import pytest
import torch
from counted_graphs import RecordedGraph

from kvq_cli.attention.attach import attach
from kvq_cli.attention.graphs import captured_steps
from kvq_cli.benchmarking import batch_sweep
from kvq_cli.benchmarking.baselines import DynamicCacheBaseline, KvqCache, StepKind
from kvq_cli.benchmarking.batch_sweep import WARM_UP, BatchSweep, sweep_batches
from kvq_cli.benchmarking.shapes import SHAPES, random_model
from kvq_cli.benchmarking.synthetic import RandomTokens, random_artifact
from kvq_cli.cache.layer import CompressedLayer
from kvq_cli.errors import UsageError
from kvq_cli.methods.registry import build_parsed
from kvq_cli.models import model_shape


@pytest.fixture(scope="module")
def tiny():
    return random_model("tiny", torch.device("cpu"), torch.float32, 0)


def swept_batches(monkeypatch, tiny, fits, max_batch=4096, seconds=1e9):
    """The measured batches and those that run out of memory, if at most `fits` sequences fit."""

    def decode(model, benchmarked, batch, sweep):
        if batch > fits:
            raise torch.OutOfMemoryError
        return {"tokens_s": float(batch)}

    monkeypatch.setattr(batch_sweep, "_decode", decode)
    [(_, rows)] = sweep_batches(tiny, [DynamicCacheBaseline()], BatchSweep(8, 2, max_batch, 0, seconds), lambda: None)
    return [row["batch"] for row in rows], [row["batch"] for row in rows if "failed" in row]


def test_batches_grow_fourfold_then_bisect_to_the_largest(monkeypatch, tiny):
    assert swept_batches(monkeypatch, tiny, 100) == ([1, 4, 16, 64, 256, 160, 112, 88], [256, 160, 112])
    assert swept_batches(monkeypatch, tiny, 100, max_batch=64) == ([1, 4, 16, 64], [])
    assert swept_batches(monkeypatch, tiny, 100, max_batch=8) == ([1, 4, 8], [])  # the stated maximum is measured
    assert swept_batches(monkeypatch, tiny, 6, max_batch=8) == ([1, 4, 8, 6, 7], [8, 7])
    assert swept_batches(monkeypatch, tiny, 2) == ([1, 4, 2, 3], [4, 3])
    assert swept_batches(monkeypatch, tiny, 0) == ([1], [1])
    assert swept_batches(monkeypatch, tiny, 100, seconds=0) == ([1], [])


@pytest.mark.parametrize("layer", [0, -1])
def test_a_batch_that_fails_leaves_its_memory_to_the_next(monkeypatch, layer):
    """Its cache is held by nothing, without a search for cycles."""
    made, select = [], CompressedLayer.select

    def limited(self, index):
        if self.index == range(model.config.num_hidden_layers)[layer] and len(index) > 8:
            raise torch.OutOfMemoryError
        made.append(ref(self))
        return select(self, index)

    model = random_model("tiny", torch.device("cpu"), torch.float32, 0)
    monkeypatch.setattr(CompressedLayer, "select", limited)
    monkeypatch.setattr(gc, "collect", lambda: None)
    benchmarked, sweep = KvqCache(build_parsed("kivi:residual=64"), "kivi", 2.0, "exact"), BatchSweep(70, 1, 16, 0)
    gc.disable()
    try:
        failed = ["failed" in batch_sweep._measure_batch(model, benchmarked, batch, sweep) for batch in (8, 16)]
    finally:
        gc.enable()
    assert failed == [False, True] and made and all(cached() is None for cached in made)


def recorded_steps(monkeypatch, benchmarked, model, sweep, seconds):
    """(row, steps) of a batch of 3. seconds: time of a step by its pattern of packing windows. steps: by kind of step,
    the tokens before each decode step, and whether a captured step was replayed."""
    steps, run = [], batch_sweep._forward

    def replays():
        return sum(graph.replays for graph in RecordedGraph.made)

    def forward(model, ids, cache):
        before, past, pattern = replays(), cache.get_seq_length(), cache.packing_pattern()
        run(model, ids, cache)
        if past == 0:
            steps.append([])
            return 1e9
        steps[-1].append((past, replays() > before))
        return seconds[pattern]

    monkeypatch.setattr(batch_sweep, "_forward", forward)
    monkeypatch.setattr(RecordedGraph, "made", [])
    return batch_sweep._decode(model, benchmarked, 3, sweep), steps


@pytest.mark.parametrize(
    ("text", "context", "seconds", "expected", "positions"),
    [
        # Keys are packed in one step of 64, values in every one.
        ("kivi:residual=64", 70, {(False, True): 1.0, (True, True): 128.0}, (63 + 128) / 64, [70, 127]),
        ("temporalkv", 33, {(False,): 1.0, (True,): 5.0}, (3 + 5) / 4, [33, 35]),
        ("channelkv", 1, {(False,): 2.0, (True,): 1e9}, 2.0, [2]),  # nothing is packed before there are 9 tokens
    ],
)
def test_kinds_of_steps_are_weighted_by_their_frequency(monkeypatch, tiny, text, context, seconds, expected, positions):
    method = build_parsed(text)
    artifact = random_artifact(method, tiny, "tiny", 0) if method.needs_artifact(model_shape(tiny)) else method
    benchmarked, sweep = KvqCache(artifact, text, 2, "exact"), BatchSweep(context, 4, 1, 0)
    row, steps = recorded_steps(monkeypatch, benchmarked, tiny, sweep, seconds)
    assert row["token_ms"] == pytest.approx(1000 * expected, rel=1e-3)
    assert row["tokens_s"] == pytest.approx(3 / expected, rel=1e-2)
    assert row["cache_bytes"] > 0
    for past, kind in zip(positions, steps, strict=True):
        timed = kind[1::2]
        assert {at for at, _ in timed} == {past} and WARM_UP < len(timed) <= WARM_UP + 4


def test_kinds_of_steps_end_with_the_context_of_the_model(tiny):
    benchmarked = KvqCache(build_parsed("kivi"), "kivi", 2, "exact")
    with benchmarked.on(tiny):
        assert benchmarked.step_kinds(100, 128) == [StepKind(100, 27 / 28), StepKind(127, 1 / 28)]
        assert benchmarked.step_kinds(100, 127) == [StepKind(100, 1.0)]


class Captured(KvqCache):
    """Steps are computed by kernels, and captured by graphs that count themselves."""

    @contextmanager
    def on(self, model):
        with super().on(model) as new_cache:
            kv = self._attached
            with captured_steps(model, kv.hooks, kv.backend, lambda _: RecordedGraph):
                yield new_cache


@pytest.mark.slow
@pytest.mark.parametrize(("text", "context"), [("kivi:residual=32", 40), ("xquant:group=16", 26)])
def test_all_timed_steps_are_replayed(monkeypatch, text, context):
    for module in ("cache.rows", "cache.layer", "attention.attention_hooks"):  # as on a GPU
        monkeypatch.setattr(f"kvq_cli.{module}.would_sync", lambda _, columns: columns == 1)
    model = random_model("tiny", torch.device("cpu"), torch.float32, 0, layers=1)
    method = build_parsed(text)
    artifact = random_artifact(method, model, "tiny", 0) if method.needs_artifact(model_shape(model)) else method
    benchmarked = Captured(artifact, text, 2, "exact", "triton")
    sweep = BatchSweep(context, 2, 1, 0)
    _, steps = recorded_steps(monkeypatch, benchmarked, model, sweep, defaultdict(lambda: 1.0))
    assert len(steps) == 2
    for kind in steps:
        timed = kind[1::2][WARM_UP:]
        assert timed and all(replayed for _, replayed in timed)


def test_throughput_and_cache_bytes_count_all_sequences(tiny):
    [(_, rows)] = sweep_batches(tiny, [DynamicCacheBaseline()], BatchSweep(32, 2, 4, 0), lambda: None)
    assert [row["batch"] for row in rows] == [1, 4]
    for row in rows:
        assert row["tokens_s"] == pytest.approx(1000 * row["batch"] / row["token_ms"], rel=0.01)
    assert rows[1]["cache_bytes"] == 4 * rows[0]["cache_bytes"] == 4 * 2 * 2 * 2 * 32 * 4 * (32 + WARM_UP + 2)


@pytest.mark.parametrize(
    "name", ["temporalkv", "channelkv", "kvquant", "xquant", "xquant-cl", "temporalkv:outliers=0.01"]
)
def test_random_artifacts_are_reproducible_and_run(tiny, name):
    artifact = random_artifact(build_parsed(name), tiny, "tiny", 0)
    again = random_artifact(build_parsed(name), tiny, "tiny", 0)
    assert artifact.tensors and all(torch.equal(x, again.tensors[key]) for key, x in artifact.tensors.items())
    ids = torch.randint(256, (2, 70), generator=torch.Generator().manual_seed(0))
    with attach(tiny, artifact) as attached, torch.no_grad():
        cache = attached.new_cache()
        tiny(input_ids=ids[:, :-1], past_key_values=cache)
        logits = tiny(input_ids=ids[:, -1:], past_key_values=cache).logits
    assert logits.isfinite().all()


def test_random_tokens_ignore_the_text():
    tokens = RandomTokens(100, 0)
    ids = tokens("x" * 4000, return_tensors="pt", verbose=False).input_ids
    assert ids.shape == (1, 1000) and len(tokens) == 100 and 0 <= int(ids.min()) <= int(ids.max()) < 100
    assert torch.equal(ids, tokens("y" * 4000).input_ids)


def test_random_models_may_have_fewer_layers():
    model = random_model("reference", torch.device("cpu"), torch.float32, 0, layers=3)
    assert model.config.num_hidden_layers == 3 != SHAPES["reference"].layers


def test_the_command_writes_rows_and_a_figure(kvq, tmp_path):
    flags = ["--random", "tiny", "--grow", "--context", 64, "--tokens", 2, "--batch", 4, "--out", "out", "--json"]
    result = kvq("bench", "generate", *flags, "--compare", "kivi,temporalkv")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert json.loads((tmp_path / "out/growth.json").read_text()) == found
    assert (tmp_path / "out/growth.png").read_bytes()[:4] == b"\x89PNG"
    cases = {(row["peer"], row["batch"]) for row in found["rows"]}
    assert cases == {(name, n) for name in ("transformers DynamicCache", "kvq kivi-2bit", "kvq temporalkv-2bit")
                      for n in (1, 4)}  # fmt: skip
    assert found["weights_bytes"] == 2 * SHAPES["tiny"].parameters


def test_several_models_have_a_file_each(kvq, tmp_path):
    flags = ["--random", "tiny,reference", "--grow", "--context", 40, "--tokens", 1, "--batch", 1, "--out", "out"]
    result = kvq("bench", "generate", *flags)
    assert result.exit_code == 0, result.stderr
    assert {path.stem for path in (tmp_path / "out").glob("*.json")} == {"growth-tiny", "growth-reference"}


GROW = ["bench", "generate", "--random", "tiny", "--grow", "--compare", "kivi", "--resume", "--out", "out", "--json"]
SETTINGS = {"--context": 32, "--tokens": 1, "--batch": 1, "--dtype": "float32"}


def test_resume_keeps_only_rows_of_the_same_settings(kvq, tmp_path, monkeypatch):
    """Of a row that is kept, the time is the one written into the file here."""
    monkeypatch.setattr(batch_sweep, "_decode", lambda *_: {"token_ms": 1.0, "tokens_s": 1.0, "cache_bytes": 1,
                                                             "peak_bytes": None})  # fmt: skip
    path = tmp_path / "out/growth.json"

    def run(**changed):
        words = SETTINGS | {f"--{key}": value for key, value in changed.items()}
        result = kvq(*GROW, *(word for pair in words.items() for word in pair))
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout), result.stderr

    first, _ = run()
    marked = json.dumps(first | {"rows": [row | {"token_ms": 7.0} for row in first["rows"]]})
    others = {"context": 40, "batch": 4, "tokens": 2, "seed": 1, "dtype": "bfloat16", "backend": "torch", "layers": 1}
    for key, value in others.items():
        path.write_text(marked)
        found, notes = run(**{key: value})
        assert {row["token_ms"] for row in found["rows"]} == {1.0}, key
        assert f"{key} (" in notes and f"now {value})" in notes and "measuring everything again" in notes, notes
    path.write_text(marked)
    found, notes = run(set="sinks=8")  # its label does not name it
    assert {row["token_ms"] for row in found["rows"]} == {1.0} and "differs in options of kvq kivi-2bit:" in notes
    path.write_text(marked)
    found, _ = run(compare="kivi,squat")
    assert [row["token_ms"] for row in found["rows"]] == [7.0, 7.0, 1.0]  # another method is added
    assert set(found["methods"]) == {"kvq kivi-2bit", "kvq squat-2bit"}


def test_a_batch_sweep_takes_one_prompt_length(fails):
    fails("bench", "generate", "--grow", "--context", "8,16", code=2, says="give --context one number, not 8,16")


def test_calibration_of_a_model_with_random_weights(kvq, tmp_path):
    flags = ["--random", "tiny", "--layers", 1, "--samples", 3, "--seqlen", 256, "--set", "hybrid=off", "--out", "out"]
    result = kvq("bench", "calibrate", *flags, "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["layers"], found["layers_of_shape"], found["calibration"]["seqlen"]) == (1, 2, 256)
    assert {"capture", "cluster"} <= set(found["phases_s"])


def test_an_unknown_shape_is_refused():
    with pytest.raises(UsageError, match="unknown shape"):
        random_model("nonsense", torch.device("cpu"), torch.float32, 0)

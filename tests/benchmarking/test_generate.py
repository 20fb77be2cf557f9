"""`kvq bench generate`: times, memory and cache bytes, the machine's description, invalid options."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from kvq_cli.benchmarking import baselines, generate
from kvq_cli.benchmarking.baselines import DynamicCacheBaseline, QuantoBaseline, quanto_baseline
from kvq_cli.benchmarking.generate import BenchmarkGrid, RunTimes, _row, measure
from kvq_cli.benchmarking.machine import PeakMemory, PeakResident, machine
from kvq_cli.benchmarking.plot import plot
from kvq_cli.benchmarking.shapes import random_model
from kvq_cli.errors import UsageError

# quanto compiles its CPU code when it is first used, which takes a minute: only in slow tests.
needs_quanto = pytest.mark.skipif(
    find_spec("optimum") is None or shutil.which("c++") is None, reason="optimum-quanto or its compiler is missing"
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tiny():
    return random_model("tiny", CPU, torch.float32, 0)


@pytest.mark.parametrize("bits", [3, pytest.param(4, marks=[pytest.mark.slow, needs_quanto])])
def test_the_command_measures_all_caches_and_cases(kvq, tmp_path, bits):
    arguments = [
        "--random",
        "tiny",
        "--context",
        "64,160",
        "--batch",
        "1,2",
        "--tokens",
        3,
        "--rounds",
        2,
        "--bits",
        bits,
    ]
    result = kvq("bench", "generate", *arguments, "--json", "--out", "out")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert json.loads((tmp_path / "out/generate.json").read_text()) == found
    assert (tmp_path / "out/generate.png").read_bytes()[:4] == b"\x89PNG"
    assert found["machine"]["versions"]["torch"] and found["machine"]["threads"] == torch.get_num_threads()
    expected = {"transformers DynamicCache", f"kvq kivi-{bits}bit"}
    expected |= {"transformers QuantizedCache (quanto, 4 bit)"} if bits == 4 else set()
    assert {row["peer"] for row in found["rows"]} == expected and len(found["rows"]) == 4 * len(expected)
    assert bool(found["skipped"]) == (bits == 3)
    for row in found["rows"]:
        assert 0 < row["token_ms"]["p20"] <= row["token_ms"]["p50"] <= row["token_ms"]["p80"]
        assert (row["token_ms"]["n"], row["prefill_ms"]["n"]) == (2 * 3, 2)
        assert row["backend"] == ("torch" if row["peer"].startswith("kvq") else None)
    assert f"kvq kivi-{bits}bit" in result.stderr  # the table


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (RuntimeError("broken"), 1, "kvq: warning: failed: kvq kivi-3bit at context 48, batch 1; 2 finished rows"),
        (KeyboardInterrupt(), 130, "kvq: warning: interrupted: kvq kivi-3bit at context 48, batch 1; 2 finished rows"),
    ],
)
def test_a_later_failure_keeps_finished_measurements(kvq, tmp_path, monkeypatch, error, code, says):
    run = generate._run

    def fail(model, benchmarked, ids, context):
        if context == 48 and benchmarked.name.startswith("kvq"):
            raise error
        return run(model, benchmarked, ids, context)

    monkeypatch.setattr(generate, "_run", fail)
    words = ["--random", "tiny", "--context", "32,48", "--batch", "1", "--tokens", 1, "--rounds", 1, "--bits", 3]
    result = kvq("bench", "generate", *words, "--out", "out")
    assert result.exit_code == code and says in result.stderr and "are kept in out/generate.json" in result.stderr
    kept = json.loads((tmp_path / "out/generate.json").read_text())["rows"]
    assert [(row["peer"], row["context"]) for row in kept] == [
        ("transformers DynamicCache", 32),
        ("kvq kivi-3bit", 32),
    ]


def test_bytes_of_the_dynamic_cache(tiny):
    cache = DynamicCache(config=tiny.config)
    tiny(input_ids=torch.zeros(3, 7, dtype=torch.long), past_key_values=cache)
    assert DynamicCacheBaseline().nbytes(cache) == 2 * tiny.config.num_hidden_layers * 3 * 7 * 2 * 32 * 4


@pytest.mark.slow
@needs_quanto
def test_bytes_of_the_quantized_cache_count_codes_scales_and_residual(tiny):
    """2 bits per number, a scale and a zero-point per group of 64; then the residual in full precision."""
    quanto = QuantoBaseline(2)
    cache = quanto.new_cache(tiny)
    tiny(input_ids=torch.zeros(1, 128, dtype=torch.long), past_key_values=cache)
    numbers = 2 * tiny.config.num_hidden_layers * 128 * 2 * 32
    codes, groups = numbers // 4, numbers // 64
    at_128 = quanto.nbytes(cache)
    assert codes + groups * (4 + 1) <= at_128 <= codes + groups * (4 + 4)
    tiny(input_ids=torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
    assert quanto.nbytes(cache) - at_128 == 2 * tiny.config.num_hidden_layers * 2 * 32 * 4


def test_a_missing_quanto_baseline_gives_the_reason(monkeypatch):
    assert "2 and 4 bits, not 3" in quanto_baseline(3)
    monkeypatch.setattr(baselines, "find_spec", lambda name: "found")
    monkeypatch.setattr(baselines, "_compile_quanto", lambda: 1 / 0)
    assert "does not compile here (ZeroDivisionError)" in quanto_baseline(2)
    monkeypatch.setattr(baselines, "find_spec", lambda name: None)
    assert "pip install" in quanto_baseline(2)


def test_rounds_alternate_caches_and_the_first_is_not_counted(tiny):
    """Caches run in turn within a round, A B A B ...: a warm-up round, the counted ones, then one for memory."""
    seen = []

    class Recorded(DynamicCacheBaseline):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def new_cache(self, model):
            seen.append(self.name)
            return super().new_cache(model)

    grid = BenchmarkGrid((8,), (1,), tokens=2, rounds=2, seed=0)
    steps = []
    rows = list(measure(tiny, [Recorded("a"), Recorded("b")], grid, lambda: steps.append(1)))
    assert "".join(seen) == "ab" * 3 + "ab"
    assert len(steps) == 2 * grid.runs
    assert [row["token_ms"]["n"] for row in rows] == [4, 4]


def test_rows_have_percentiles_in_milliseconds():
    row = _row(DynamicCacheBaseline(), 8, 1, [RunTimes(1.0, [0.001 * n for n in range(11)], 5)], None)
    assert row["token_ms"] == {"p20": 2.0, "p50": 5.0, "p80": 8.0, "n": 11}
    assert row["prefill_ms"]["p50"] == 1000.0 and row["peak_bytes"] is None


def test_peak_memory_counts_simultaneous_tensors():
    kept = []
    for _ in range(2):  # the tensor kept by the first block is allocated before the second
        with PeakMemory(CPU) as peak:
            torch.ones(64 * 2**20, dtype=torch.uint8)
            torch.ones(16 * 2**20, dtype=torch.uint8)
            kept.append(torch.ones(2**20, dtype=torch.uint8))
        assert peak.bytes == 64 * 2**20
    with PeakMemory(CPU) as peak:
        pass
    assert peak.bytes == 0


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system has no high-water mark")
def test_peak_resident_counts_temporary_memory():
    with PeakResident() as peak:
        torch.ones(256 * 2**20, dtype=torch.uint8)
    assert 200 * 2**20 < peak.bytes < 300 * 2**20


def test_machine_names_the_processor_and_versions():
    found = machine(CPU)
    assert found["device"] and found["versions"]["transformers"] and found["date"].endswith("+00:00")


def test_plot_writes_a_figure(tmp_path):
    spread = {"p20": 1.0, "p50": 2.0, "p80": 3.0, "n": 3}
    rows = [
        {"peer": peer, "context": context, "batch": 1, "token_ms": spread, "cache_bytes": 1000}
        for peer in "ab"
        for context in (512, 1024)
    ]
    plot(rows, "title", tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 5000


def test_unknown_shapes_are_refused():
    with pytest.raises(UsageError, match="valid: tiny, reference"):
        random_model("nonsense", CPU, torch.float32, 0)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--context", "0"], 2, "--context 0: must be whole numbers"),
        (["--batch", "x"], 2, "--batch x"),
        (["--compare", ""], 2, "--compare"),
        (["--compare", "nonsense"], 2, "unknown method"),
        (["--compare", "temporalkv", "--bits", "1"], 1, "kvq calibrate"),
        (["--random", "nonsense"], 2, "--random nonsense"),
        (["--context", "999999"], 2, "exceed the context"),
        (["--random", "tiny", "--out", "/proc/nonsense"], 1, "cannot write /proc/nonsense"),
    ],
)
def test_invalid_options_are_refused_in_one_line(kvq, arguments, code, says):
    result = kvq("bench", "generate", "--bits", 3, *arguments)
    lines = result.stderr.splitlines()
    assert result.exit_code == code and len(lines) == 1 and says in lines[0], result.output

"""`kvq bench report`: comparison of GPU results with the performance targets."""

from __future__ import annotations

import json

import pytest
from kvq_kernels.decode_attention import aot_cases

from kvq_cli.benchmarking.kernels.performance_targets import compare_with_targets, load_gpu_results, performance_targets

MACHINE = {"device": "X", "gpu": {"architecture": "sm_90"}, "date": "2026-01-01", "versions": {"torch": "2"}}


def decoded(case, batch, context, ratio):
    us = {"p20": 1.0, "p50": 1.0, "p80": 1.0, "n": 1}
    place = {"operation": "decode_attention", "case": case, "batch": batch, "context": context}
    return place | {"us": us, "ratio": ratio, "baseline": False}


def timed(operation, case, us, model="llama-3.1-8b", context=8192):
    return {"operation": operation, "case": case, "model": model, "context": context, "us": {"p50": us}}


def found(rows=(), **documents):
    return compare_with_targets({"kernels": {"machine": MACHINE, "rows": list(rows)}} | documents)


def at(rows, target, where):
    [row] = [row for row in rows if target in row["target"] and row["where"] == where]
    return row


@pytest.mark.parametrize(
    ("ratio", "verdict"), [(3.0, "reached"), (3.9, "stretch"), (2.7, "missed: 0.90 of it"), (None, "not measured")]
)
def test_verdicts_of_decode_attention(ratio, verdict):
    rows = [] if ratio is None else [decoded("kvq kivi-2bit-g32", 8, 32768, ratio)]
    row = at(found(rows), "2 bit", "kivi-2bit-g32, 8 x 32768")
    assert row["verdict"] == verdict and row["wanted"] == "at least 3" and row["bold"]


def test_targets_name_shipped_stores():
    named = {store for target in performance_targets()["decode"] for store in target["stores"]}
    assert named - set(aot_cases.storage_cases()) <= {"temporal-2bit-bytes", "channel-2bit-bytes"}


def test_verdicts_of_inner_grouping():
    rows = [
        timed("quantized_matvec", "inner grouping", 7.0),
        timed("quantized_matvec", "outer grouping", 10.0),
        timed("quantized_matvec", "torch.matmul", 50.0),
        timed("quantized_matvec", "inner grouping", 7.0, context=512),
        timed("quantized_matvec", "outer grouping", 10.0, context=512),
    ]
    all_rows = found(rows)
    outer, plain = (at(all_rows, name, "llama-3.1-8b, 8192") for name in ("of outer's", "of torch.matmul's"))
    assert (outer["measured"], outer["verdict"]) == (0.3, "reached")
    assert plain["measured"] == 0.86 and plain["verdict"].startswith("missed")
    assert not [row for row in all_rows if row["where"] == "llama-3.1-8b, 512"]


def test_verdicts_of_hybrid_groups_and_assignment():
    rows = [
        timed("quantize_pack", "symmetric", 100.0),
        timed("quantize_pack", "hybrid", 106.0),
        timed("assign_centroids", "blocks of 4", 4900.0, model=None, context=131072),
    ]
    assert at(found(rows), "hybrid", "llama-3.1-8b, 8192")["verdict"] == "missed: 1.01 of it"
    row = at(found(rows), "assignment", "blocks of 4, 131072 tokens")
    assert (row["measured"], row["verdict"]) == (4.9, "reached")


def test_hybrid_groups_without_symmetric_ones_are_not_compared():
    """As where the symmetric kernel failed."""
    assert not [row for row in found([timed("quantize_pack", "hybrid", 106.0)]) if "hybrid" in row["target"]]


@pytest.mark.parametrize(
    ("changes", "measured"), [({}, 500.0), ({"layers": 2}, 8000.0), ({"calibration": {"samples": 8}}, None)]
)
def test_calibration_times_are_extrapolated_to_all_layers(changes, measured):
    settings = {"samples": 64, "seqlen": 2048} | changes.pop("calibration", {})
    document = {"model": "m", "total_s": 500.0, "layers": 32, "layers_of_shape": 32, "calibration": settings} | changes
    row = at(found(calibrate=document), "calibration", found(calibrate=document)[-1]["where"])
    assert row["measured"] == measured


def test_batch_sweeps_compare_largest_batches_and_memory_with_weights():
    def row(peer, bits, batch, tokens_s, peak):
        return {"peer": peer, "bits": bits, "batch": batch, "tokens_s": tokens_s, "peak_bytes": peak}

    rows = [
        row("plain", None, 4, 100.0, 80),
        {"peer": "plain", "bits": None, "batch": 16, "failed": "out of memory"},
        row("kvq temporalkv-2bit", 2, 4, 120.0, 10),
        row("kvq temporalkv-2bit", 2, 16, 400.0, 40),
    ]
    result = found(**{"growth-m": {"model": "m", "weights_bytes": 20, "rows": rows}})
    assert at(result, "throughput", "m, kvq temporalkv-2bit")["measured"] == 4.0
    assert at(result, "memory", "m, kvq temporalkv-2bit, batch 4")["measured"] == round(100 / 30, 2)
    assert at(result, "TemporalKV's speed", "m, kvq temporalkv-2bit, batch 4")["measured"] == 1.2


def test_batch_sweeps_compare_with_the_best_16_bit_cache():
    def row(peer, bits, batch, tokens_s, peak):
        return {"peer": peer, "bits": bits, "batch": batch, "tokens_s": tokens_s, "peak_bytes": peak}

    rows = [
        row("plain", None, 4, 100.0, 80),
        row("kvq fp16", 16, 4, 150.0, 70),
        row("kvq temporalkv-2bit", 2, 4, 120.0, 10),
        row("kvq temporalkv-2bit", 2, 16, 300.0, 40),
    ]
    result = found(**{"growth-m": {"model": "m", "weights_bytes": 20, "rows": rows}})
    assert at(result, "throughput", "m, kvq temporalkv-2bit")["measured"] == 2.0
    assert at(result, "memory", "m, kvq temporalkv-2bit, batch 4")["measured"] == 3.0
    assert at(result, "TemporalKV's speed", "m, kvq temporalkv-2bit, batch 4")["measured"] == 0.8
    assert not [row for row in result if "fp16" in row["where"]]


def test_the_command(kvq, fails, tmp_path):
    fails("bench", "report", code=1, says="no results of a GPU in benchmarks")
    folder = tmp_path / "benchmarks" / "x"
    folder.mkdir(parents=True)
    document = {"machine": MACHINE, "dry": False, "rows": [decoded("kvq kivi-2bit-g32", 8, 32768, 2.0)]}
    (folder / "kernels.json").write_text(json.dumps(document))
    (folder.parent / "dry").mkdir()
    (folder.parent / "dry" / "kernels.json").write_text(json.dumps(document | {"dry": True}))
    result = kvq("bench", "report", "--json")
    assert result.exit_code == 0, result.stderr
    [gpu] = json.loads(result.stdout)["results"]
    assert at(gpu["rows"], "2 bit", "kivi-2bit-g32, 8 x 32768")["verdict"] == "missed: 0.67 of it"
    assert "missed: 0.67 of it" in result.stderr and "X, 2026-01-01, torch 2" in result.stderr
    assert list(load_gpu_results(folder)) == [folder]
    (folder / "kernels.json").write_text("{")
    fails("bench", "report", code=1, says="cannot read benchmarks/x/kernels.json")

"""Performance targets of kernels and models (`performance_targets.json`), and GPU results compared with them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeAlias

from kvq_cli.errors import KvqError
from kvq_cli.files import read_text

#: Patterns of result files in a GPU's folder.
RESULT_FILES = ("kernels", "calibrate", "growth-*", "generate-*")

#: A row of a result file, a limit of the targets, or a row of the comparison.
Row: TypeAlias = dict[str, Any]
#: (operation, case, model, batch, context) of a timed case.
CaseKey: TypeAlias = tuple[str, str, str | None, int | None, int]


@cache
def performance_targets() -> dict[str, Any]:
    """Return the targets: limits ("at_least" or "at_most") by name, and those of decode attention in "decode"."""
    return json.loads(files(__package__).joinpath("performance_targets.json").read_text(encoding="utf-8"))


def load_gpu_results(folder: Path) -> dict[Path, dict[str, Any]]:
    """Read the results in `folder` and its subfolders: folder -> file stem -> document, without dry runs."""
    results: dict[Path, dict[str, Any]] = {}
    for subfolder in [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]:
        for pattern in RESULT_FILES:
            for path in sorted(subfolder.glob(f"{pattern}.json")):
                try:
                    document = json.loads(read_text(path))
                except (OSError, ValueError) as error:
                    raise KvqError(f"cannot read {path}: {error}") from None
                if "gpu" in document.get("machine", {}) and not document.get("dry"):
                    results.setdefault(subfolder, {})[path.stem] = document
    return results


def compare_with_targets(result: dict[str, Any]) -> list[Row]:
    """Return a row per target and shape: the measured value, the target ("wanted"), its "stretch" value, and the
    verdict: "reached", "stretch", "missed" with the reached share, or "not measured".

    result: documents of one GPU by file stem, as from `load_gpu_results`.
    """
    kernels = result.get("kernels", {}).get("rows", [])
    timed = {_case_key(row): row for row in kernels if "us" in row}
    rows = [*_decode(timed), *_matvec(timed), *_quantize_and_assign(timed), *_tail_cost(kernels)]
    if "calibrate" in result:
        rows.append(_calibration(result["calibrate"]))
    for name, document in result.items():
        if name.startswith("growth"):
            rows += _batch_sweep(document)
    return rows


def measured_rows(folder: Path, target: str, where: str = "") -> Iterator[tuple[str, Row]]:
    """Yield (name of a GPU's folder, row) of the measured rows of a target whose place contains `where`."""
    for subfolder, result in load_gpu_results(folder).items():
        for row in compare_with_targets(result):
            if row["target"] == target and where in row["where"] and row["measured"] is not None:
                yield subfolder.name, row


def _case_key(row: Row) -> CaseKey:
    return row["operation"], row["case"], row.get("model"), row.get("batch"), row["context"]


def _verdict(target: str, where: str, measured: float | None, limit: Row, bold: bool = True) -> Row:
    """Return the row of a target. limit: {"at_least" or "at_most": ..., "stretch": ...}."""
    at_least, stretch = "at_least" in limit, limit.get("stretch")
    bound: float = limit["at_least"] if at_least else limit["at_most"]
    wanted = f"at least {bound:g}" if at_least else f"at most {bound:g}"
    row = {"target": target, "where": where, "measured": measured, "wanted": wanted, "stretch": stretch, "bold": bold}
    if measured is None:
        return row | {"verdict": "not measured"}
    if measured >= bound if at_least else measured <= bound:
        return row | {"verdict": "stretch" if stretch is not None and measured >= stretch else "reached"}
    return row | {"verdict": f"missed: {measured / bound:.2f} of it"}


def _decode(timed: dict[CaseKey, Row]) -> Iterator[Row]:
    """Speed-up of decode attention over 16 bits, per store and shape."""
    for target in performance_targets()["decode"]:
        for size, shapes in performance_targets()["places"].items():
            at_least, stretch = target[size]
            for store in target["stores"]:
                for batch, context in shapes:
                    row = timed.get(("decode_attention", f"kvq {store}", None, batch, context), {})
                    where = f"{store}, {batch} x {context}"
                    bold = target["bold"] and size == "large"
                    limit = {"at_least": at_least, "stretch": stretch}
                    yield _verdict(f"{target['name']}, times 16 bit", where, row.get("ratio"), limit, bold)


def _matvec(timed: dict[CaseKey, Row]) -> Iterator[Row]:
    """Time that InnerQ's inner grouping saves, of outer grouping's and of torch.matmul's."""
    for name, base, title in (
        ("inner_faster_than_outer", "outer grouping", "inner grouping's time saved, of outer's"),
        ("inner_below_matmul", "torch.matmul", "inner grouping's time saved, of torch.matmul's"),
    ):
        limit = performance_targets()[name]
        for (operation, case, model, _, context), row in timed.items():
            other = timed.get((operation, base, model, None, context))
            if case != "inner grouping" or other is None or context < limit["from_context"]:
                continue
            saved = round(1 - row["us"]["p50"] / other["us"]["p50"], 3)
            yield _verdict(title, f"{model}, {context}", saved, limit)


def _quantize_and_assign(timed: dict[CaseKey, Row]) -> Iterator[Row]:
    """Overhead of hybrid over symmetric quantization, and the time to assign centroids."""
    limit = performance_targets()["hybrid_over_symmetric"]
    for (operation, case, model, _, context), row in timed.items():
        if operation == "quantize_pack" and case == "hybrid" and context >= limit["from_context"]:
            other = timed.get((operation, "symmetric", model, None, context))
            if other is None:
                continue
            ratio = round(row["us"]["p50"] / other["us"]["p50"], 3)
            yield _verdict("hybrid's time, times symmetric's", f"{model}, {context}", ratio, limit)
        if operation == "assign_centroids":
            milliseconds = round(row["us"]["p50"] / 1000, 3)
            yield _verdict(
                "assignment, ms per layer",
                f"{case}, {context} tokens",
                milliseconds,
                performance_targets()["assign_ms"],
            )


def _tail_cost(kernels: list[Row]) -> Iterator[Row]:
    """Time of an exact token in packed tokens, beside the kernel's `EXACT_COST`."""
    without_tail = {_store_key(row): row for row in kernels if "store" in row and "tail" not in row and "us" in row}
    for row in kernels:
        if "tail" not in row or "us" not in row or _store_key(row) not in without_tail:
            continue
        base = without_tail[_store_key(row)]["us"]["p50"]
        cost = 1 + (row["us"]["p50"] - base) / row["tail"]["added"] / (base / row["context"])
        yield {
            "target": "an exact token's time, in packed tokens",
            "where": f"{row['store']}, {row['batch']} x {row['context']}",
            "measured": round(cost, 2),
            "wanted": f"{row['tail']['assumed']} is assumed",
            "stretch": None,
            "bold": False,
            "verdict": "measured",
        }


def _store_key(row: Row) -> tuple[str | None, int | None, int | None]:
    return row.get("store"), row.get("batch"), row.get("context")


def _calibration(document: Row) -> Row:
    """Seconds of a calibration, extrapolated from the measured layers to all of the model's."""
    settings, limit = document["calibration"], performance_targets()["calibrate_s"]
    where = f"{document['model']}, {settings['samples']} x {settings['seqlen']} tokens"
    if (settings["samples"], settings["seqlen"]) != (limit["samples"], limit["seqlen"]):
        return _verdict("calibration, s", where, None, limit)
    share = document["layers"] / document["layers_of_shape"]
    if share < 1:
        where += f", from {document['layers']} of {document['layers_of_shape']} layers"
    return _verdict("calibration, s", where, round(document["total_s"] / share, 1), limit)


def _batch_sweep(document: Row) -> Iterator[Row]:
    """Throughput of each method at its largest batch, its peak memory with weights at the largest 16-bit batch, and
    TemporalKV's throughput there, over those of 16 bits: the best of DynamicCache and kvq's fp16 at each batch."""
    weights: int = document["weights_bytes"]
    by_method: dict[str, dict[int, Row]] = {}
    by_batch_16bit: dict[int, list[Row]] = {}
    for row in document["rows"]:
        if "failed" in row:
            continue
        if row["bits"] in (None, 16):
            by_batch_16bit.setdefault(row["batch"], []).append(row)
        else:
            by_method.setdefault(row["peer"], {})[row["batch"]] = row
    if not by_batch_16bit:
        return
    largest = max(by_batch_16bit)
    best = max(row["tokens_s"] for rows in by_batch_16bit.values() for row in rows)
    speed = max(row["tokens_s"] for row in by_batch_16bit[largest])
    peak = min(row["peak_bytes"] for row in by_batch_16bit[largest])
    targets = performance_targets()
    for method, by_batch in by_method.items():
        where = f"{document['model']}, {method}"
        gain = round(max(row["tokens_s"] for row in by_batch.values()) / best, 2)
        yield _verdict("throughput at the largest batch, times 16 bit", where, gain, targets["throughput_over_fp16"])
        if largest in by_batch:
            row = by_batch[largest]
            where += f", batch {largest}"
            ratio = round((weights + peak) / (weights + row["peak_bytes"]), 2)
            yield _verdict("peak memory with weights, times less", where, ratio, targets["memory_under_fp16"])
            if "temporalkv" in method:
                faster = round(row["tokens_s"] / speed, 2)
                yield _verdict("TemporalKV's speed, times 16 bit", where, faster, targets["temporalkv_over_fp16"])

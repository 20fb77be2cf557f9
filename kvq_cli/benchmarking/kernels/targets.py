"""How fast kernels and models should be (`targets.json`), and what was measured beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvq_cli.errors import KvqError

#: Result files that a GPU's folder may have; of growth one per model.
NAMES = ("kernels", "calibrate", "growth-*", "generate-*")


@cache
def targets() -> dict[str, Any]:
    return json.loads(files(__package__).joinpath("targets.json").read_text(encoding="utf-8"))


def results(folder: Path) -> dict[Path, dict[str, dict]]:
    """Folder -> name of a result -> the document, of `folder` or of those in it; dry runs left out."""
    found: dict[Path, dict[str, dict]] = {}
    for place in [folder, *sorted(path for path in folder.glob("*") if path.is_dir())]:
        for pattern in NAMES:
            for path in sorted(place.glob(f"{pattern}.json")):
                try:
                    document = json.loads(path.read_text(encoding="utf-8"))
                except (OSError, ValueError) as error:
                    raise KvqError(f"cannot read {path}: {error}") from None
                if "gpu" in document.get("machine", {}) and not document.get("dry"):
                    found.setdefault(place, {})[path.stem] = document
    return found


def verdicts(result: dict[str, dict]) -> list[dict[str, Any]]:
    """A row per target and place: measured, wanted, stretch, and the verdict "reached", "stretch" or by what factor it
    is missed; "not measured" where the results do not say."""
    rows = []
    kernels = result.get("kernels", {}).get("rows", [])
    timed = {_place(row): row for row in kernels if "us" in row}
    rows += _decode(timed)
    rows += _products(timed)
    rows += _others(timed)
    rows += _tails(kernels)
    if "calibrate" in result:
        rows.append(_calibration(result["calibrate"]))
    for name, document in result.items():
        if name.startswith("growth"):
            rows += _growth(document)
    return rows


def _place(row: dict) -> tuple:
    return row["operation"], row["case"], row.get("model"), row.get("batch"), row.get("context")


def _verdict(target: str, where: str, measured: float | None, limit: dict[str, float], bold: bool = True) -> dict:
    """limit: {"at_least" or "at_most": ..., "stretch": ...}."""
    least, most, stretch = limit.get("at_least"), limit.get("at_most"), limit.get("stretch")
    wanted = f"at least {least:g}" if least is not None else f"at most {most:g}"
    row = {"target": target, "where": where, "measured": measured, "wanted": wanted, "stretch": stretch, "bold": bold}
    if measured is None:
        return row | {"verdict": "not measured"}
    reached = measured >= least if least is not None else measured <= most
    if reached:
        return row | {"verdict": "stretch" if stretch is not None and measured >= stretch else "reached"}
    return row | {"verdict": f"missed: {measured / (least if least is not None else most):.2f} of it"}


def _decode(timed: dict[tuple, dict]) -> Iterator[dict]:
    for target in targets()["decode"]:
        for size, places in targets()["places"].items():
            least, stretch = target[size]
            for store in target["stores"]:
                for batch, context in places:
                    row = timed.get(("decode_attention", f"kvq {store}", None, batch, context), {})
                    where = f"{store}, {batch} x {context}"
                    bold = target["bold"] and size == "large"
                    limit = {"at_least": least, "stretch": stretch}
                    yield _verdict(f"{target['name']}, times 16 bit", where, row.get("ratio"), limit, bold)


def _products(timed: dict[tuple, dict]) -> Iterator[dict]:
    for name, base, title in (
        ("inner_faster_than_outer", "outer grouping", "inner grouping's time saved, of outer's"),
        ("inner_below_matmul", "torch.matmul", "inner grouping's time saved, of torch.matmul's"),
    ):
        limit = targets()[name]
        for (operation, case, model, _, context), row in timed.items():
            other = timed.get((operation, base, model, None, context))
            if case != "inner grouping" or other is None or context < limit["from_context"]:
                continue
            saved = round(1 - row["us"]["p50"] / other["us"]["p50"], 3)
            yield _verdict(title, f"{model}, {context}", saved, limit)


def _others(timed: dict[tuple, dict]) -> Iterator[dict]:
    limit = targets()["hybrid_over_symmetric"]
    for (operation, case, model, _, context), row in timed.items():
        if operation == "quantize_pack" and case == "hybrid" and context >= limit["from_context"]:
            other = timed[operation, "symmetric", model, None, context]
            ratio = round(row["us"]["p50"] / other["us"]["p50"], 3)
            yield _verdict("hybrid's time, times symmetric's", f"{model}, {context}", ratio, limit)
        if operation == "assign_centroids":
            took = round(row["us"]["p50"] / 1000, 3)
            yield _verdict("assignment, ms per layer", f"{case}, {context} tokens", took, targets()["assign_ms"])


def _tails(kernels: list[dict]) -> Iterator[dict]:
    """Yield how many packed tokens' time a token of the unpacked tail takes, beside what the kernel's plan assumes."""
    plain = {_store(row): row for row in kernels if "store" in row and "tail" not in row and "us" in row}
    for row in kernels:
        if "tail" not in row or "us" not in row or _store(row) not in plain:
            continue
        base = plain[_store(row)]["us"]["p50"]
        cost = 1 + (row["us"]["p50"] - base) / row["tail"]["added"] / (base / row["context"])
        yield {
            "target": "a tail token's time, in packed tokens",
            "where": f"{row['store']}, {row['batch']} x {row['context']}",
            "measured": round(cost, 2),
            "wanted": f"{row['tail']['assumed']} is assumed",
            "stretch": None,
            "bold": False,
            "verdict": "measured",
        }


def _store(row: dict) -> tuple:
    return row.get("store"), row.get("batch"), row.get("context")


def _calibration(document: dict) -> dict:
    """Of some of a model's layers: what all of them take at that rate."""
    settings, limit = document["calibration"], targets()["calibrate_s"]
    where = f"{document['model']}, {settings['samples']} x {settings['seqlen']} tokens"
    if (settings["samples"], settings["seqlen"]) != (limit["samples"], limit["seqlen"]):
        return _verdict("calibration, s", where, None, limit)
    share = document["layers"] / document["layers_of_shape"]
    if share < 1:
        where += f", from {document['layers']} of {document['layers_of_shape']} layers"
    return _verdict("calibration, s", where, round(document["total_s"] / share, 1), limit)


def _growth(document: dict) -> Iterator[dict]:
    """Of each method: throughput at the largest batch that fits; peak memory, weights included, at the largest batch
    of 16 bits; throughput at that batch. 16 bits: at each batch the best of transformers' plain cache and kvq's own,
    whose steps are CUDA graphs as the methods' are."""
    weights, by_peer, plain = document["weights_bytes"], {}, {}
    for row in document["rows"]:
        if "failed" not in row:
            rows = plain if row["bits"] in (None, 16) else by_peer.setdefault(row["peer"], {})
            rows.setdefault(row["batch"], []).append(row)
    if not plain:
        return
    most = max(plain)
    best = max(row["tokens_s"] for rows in plain.values() for row in rows)
    speed, peak = max(row["tokens_s"] for row in plain[most]), min(row["peak_bytes"] for row in plain[most])
    for peer, rows in by_peer.items():
        where = f"{document['model']}, {peer}"
        gain = round(max(row["tokens_s"] for (row,) in rows.values()) / best, 2)
        yield _verdict("throughput at the largest batch, times 16 bit", where, gain, targets()["throughput_over_fp16"])
        if most in rows:
            (own,) = rows[most]
            where += f", batch {most}"
            ratio = round((weights + peak) / (weights + own["peak_bytes"]), 2)
            yield _verdict("peak memory with weights, times less", where, ratio, targets()["memory_under_fp16"])
            if "temporalkv" in peer:
                faster = round(own["tokens_s"] / speed, 2)
                yield _verdict("TemporalKV's speed, times 16 bit", where, faster, targets()["temporalkv_over_fp16"])

"""Compact result files: only what tables, plots, claims and pages are computed from.

Only this part is in the repository. `kvq eval` leaves each method's full document beside it, in `METHOD/results.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvq_cli.files import write_text

#: Keys of a method's document, in lm-eval's schema, that tables, plots and paired differences read.
METHOD_KEYS = ("results", "higher_is_better", "n-samples", "samples", "config", "cache", "kvq_version")
#: Values of a method's `config` that differ from run to run, or that its other values determine.
RUN_KEYS = ("run", "folder")
#: Values of an evaluation's cache summary that tables and plots read.
CACHE_KEYS = ("nominal_bits", "measured_bits", "bytes", "ratio", "tokens")
#: Significant digits of the numbers of studies and of differences: claims compare them, and pages print four.
DIGITS = 6


def compact_file(path: Path) -> None:
    """Replace a result file by its compact form."""
    write_text(path, compact_text(compact(json.loads(path.read_text(encoding="utf-8")))))


def compact(document: Any) -> Any:
    """The document of a comparison or study without the values that only its own run needs; any other unchanged."""
    if not isinstance(document, Mapping):
        return document
    if "table" in document:  # a comparison; the table repeats its methods' results
        methods = {label: _compact_method(method) for label, method in document["methods"].items()}
        return {"methods": methods, **({"failed": document["failed"]} if "failed" in document else {})}
    if "study" in document:  # `drawn` holds the points of the figure
        numbers = {key: value for key, value in document["numbers"].items() if key != "drawn"}
        return rounded({**document, "numbers": numbers})
    return document


def rounded(value: Any) -> Any:
    """The same with `DIGITS` significant digits of each float."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, (list, tuple)) else value


def compact_text(document: Any) -> str:
    """JSON with a line for each entry of the two outer levels, so that a changed method is a changed line."""
    return _text(document, depth=2) + "\n"


def _compact_method(method: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: method[key] for key in METHOD_KEYS if key in method}
    kept["config"] = {key: value for key, value in kept["config"].items() if key not in RUN_KEYS}
    kept["cache"] = {
        name: {key: value for key, value in summary.items() if key in CACHE_KEYS}
        for name, summary in method["cache"].items()
    }
    return kept


def _text(value: Any, depth: int) -> str:
    if depth and isinstance(value, dict) and value:
        entries = [f"{json.dumps(key, ensure_ascii=False)}:{_text(entry, depth - 1)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(entries) + "\n}"
    if depth and isinstance(value, list) and value:
        return "[\n" + ",\n".join(_text(entry, depth - 1) for entry in value) + "\n]"
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))

"""Cache sizes printed in the papers, beside those that kvq counts for the same method, model and length."""

from __future__ import annotations

from typing import Any

from kvq_cli.benchmarking.accounting import account, artifact_bytes
from kvq_cli.benchmarking.shapes import known_shape
from kvq_cli.cache.report import CacheReport
from kvq_cli.methods.base import Method, ModelShape
from kvq_cli.methods.registry import build_parsed
from kvq_cli.papers.published import rows, value

FILE = "sizes.csv"


def compare_sizes() -> list[dict[str, Any]]:
    """Return the rows of sizes.csv with the `published` number, the `counted` one in the same unit, and the `report`.

    Figures: "packed ratio" leaves out windows (the papers' long-context limit); "ratio %" and "MB" (10^6 bytes) count
    the whole cache; "constants MB" the centroids alone; "outlier bits" the bits per number that outliers add.
    """
    sizes = []
    for row in rows(FILE):
        shape, method = known_shape(row["shape"], "--shapes").model_shape(), build_parsed(row["method"])
        report = account(method, shape, int(row["context"]))
        printed = value(row["paper"], row["table"], row["model"], row["row"], row["column"])
        counted = _figure(row["figure"], report, method, shape)
        sizes.append({**row, "published": printed, "counted": counted, "report": report})
    return sizes


def _figure(figure: str, report: CacheReport, method: Method, shape: ModelShape) -> float:
    if figure == "packed ratio":
        return report.packed_bits / 16
    if figure == "ratio %":
        return 100 * report.bytes / report.fp16_bytes
    if figure == "MB":
        return report.bytes / 1e6
    if figure == "constants MB":
        return artifact_bytes(method, shape)["centroids"] / 1e6
    if figure == "outlier bits":
        outliers = sum(size for name, size in report.parts.items() if name.startswith("outlier"))
        return 8 * outliers / report.packed_numbers
    raise ValueError(f"unknown figure {figure!r}")

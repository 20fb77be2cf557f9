"""Methods of several result folders in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq_cli.errors import UsageError
from kvq_cli.evaluation.runs import settings, shown_results
from kvq_cli.evaluation.tabulate import EXACT


def merged(folder: Path, methods: Mapping[str, Any], others: Sequence[Path]) -> dict[str, Any]:
    """Return `methods` of `folder` and those that the `others` show, by label; a label that is taken gets the folder.

    Their samples are named by absolute paths, so that differences between folders are paired. UsageError for a folder
    whose samples are others: of another model, other tasks, settings or versions.
    """
    found, expected = dict(methods), settings(next(iter(methods.values())))
    for other in others:
        for label, document in shown_results(other).methods.items():
            differing = [name for name, value in settings(document).items() if value != expected[name]]
            if differing:
                raise UsageError(
                    f"--with {other}: another {', '.join(differing)} than {folder} has: not the same samples"
                )
            if label == EXACT and EXACT in found:
                continue
            samples = {name: str((other / path).resolve()) for name, path in document["samples"].items()}
            found[f"{label} ({other.name})" if label in found else label] = {**document, "samples": samples}
    return found

"""Methods of several result folders in one table."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvq_cli.errors import UsageError, reading
from kvq_cli.evaluation.runs import COMPARISON, settings, shown_results
from kvq_cli.evaluation.tabulate import EXACT


def merged(folder: Path, methods: Mapping[str, Any], others: Sequence[Path]) -> dict[str, Any]:
    """Return `methods` of `folder` and those that the `others` show, by label; a label that is taken gets the folder.

    Their samples are named by absolute paths, so that differences between folders are paired. UsageError for a folder
    whose samples are others: of another model, other tasks, settings or versions.
    """
    found, expected = dict(methods), settings(next(iter(methods.values())))
    for other in others:
        with reading(f"--with {other}: not results of kvq", "run the evaluation again"):
            # The samples of one method's folder are named from the folder of the evaluation.
            base = other if (other / COMPARISON).exists() else other.parent
            for label, document in shown_results(other).methods.items():
                _check(other, folder, settings(document), expected)
                if label == EXACT and EXACT in found:
                    continue
                samples = {name: str((base / path).resolve()) for name, path in document.get("samples", {}).items()}
                found[_free(label, other, found)] = {**document, "samples": samples}
    return found


def _check(other: Path, folder: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    unsaid = [path for path, its in ((other, found), (folder, expected)) if its["tasks"] is None]
    if unsaid:
        raise UsageError(f"--with {other}: {unsaid[0]} does not say the settings of its tasks: evaluate again")
    differing = [name for name, value in found.items() if value != expected[name]]
    if differing:
        raise UsageError(f"--with {other}: another {', '.join(differing)} than {folder} has: not the same samples")


def _free(label: str, folder: Path, taken: Mapping[str, Any]) -> str:
    """Return the label, with the folder's name, its path or a number if it is taken."""
    numbered = (f"{folder} {number}" for number in itertools.count(2))
    places = itertools.chain([folder.resolve().name, str(folder)], numbered)
    names = itertools.chain([label], (f"{label} ({place})" for place in places))
    return next(name for name in names if name not in taken)

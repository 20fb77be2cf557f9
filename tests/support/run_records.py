"""Result documents without what differs from run to run."""

from __future__ import annotations

from typing import Any


def without_run(document: dict[str, Any]) -> dict[str, Any]:
    """A comparison, or a method's document, without the number, time and command of its run."""
    kept = {key: value for key, value in document.items() if key != "run"}
    if "methods" in kept:
        return {**kept, "methods": {label: without_run(one) for label, one in kept["methods"].items()}}
    return {**kept, "config": {key: value for key, value in kept["config"].items() if key != "run"}}

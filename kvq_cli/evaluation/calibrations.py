"""Means over several calibrations of one method: what another seed or text of the calibration changes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from kvq_cli.errors import UsageError
from kvq_cli.evaluation.tabulate import Column, Entry, Table, tabulate

COUNT = Column("calibrations", "", "", 0, 0)


def over_calibrations(methods: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of means over artifacts of the same method with the same options, and their number.

    Errors are standard deviations between calibrations, not standard errors over samples; None for one calibration.
    methods: result documents by label, each of another artifact. UsageError if no method has two.
    """
    table, groups = tabulate(methods), _groups(methods)
    if all(len(labels) < 2 for labels in groups):
        raise UsageError("--calibrations: no method has results of two artifacts: compare folders of `kvq calibrate`")
    rows = {}
    for labels in groups:
        entries = [_mean([table.rows[label][index] for label in labels]) for index in range(len(table.columns))]
        rows[_label(methods, labels)] = [*entries, Entry(len(labels))]
    return Table([*table.columns, COUNT], rows)


def _groups(methods: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Labels by method and options; of results of the same artifact, or of methods without one, the first."""
    groups: dict[str, dict[str, str]] = {}
    for label, document in methods.items():
        config = document["config"]
        artifact = json.dumps(config.get("artifact"), sort_keys=True)
        groups.setdefault(json.dumps(config["method"], sort_keys=True), {}).setdefault(artifact, label)
    return [list(labels.values()) for labels in groups.values()]


def _label(methods: Mapping[str, Mapping[str, Any]], labels: Sequence[str]) -> str:
    """Return the label of one calibration; of several, that of the folder of results without the artifact's digest."""
    if len(labels) == 1:
        return labels[0]
    return re.sub(r",artifact=[0-9a-f]+", "", methods[labels[0]]["config"].get("folder", labels[0]))


def _mean(entries: Sequence[Entry]) -> Entry:
    values = [entry.value for entry in entries if entry.value is not None]
    if len(values) < len(entries):
        return Entry(None)
    return Entry(fmean(values), stdev(values) if len(values) > 1 and len(set(values)) > 1 else None)

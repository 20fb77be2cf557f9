"""pytest plugin (`-p gpu.shard`): run every N-th test, skip those that passed before, and record each result.

KVQ_SHARD=I/N: this is the I-th of N processes. KVQ_TEST_RESULTS=FILE: a JSON line per test is appended to it.
KVQ_TEST_PASSED=FILE: names of tests to skip, one per line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

RESULTS = os.environ.get("KVQ_TEST_RESULTS")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = os.environ.get("KVQ_TEST_PASSED", "")
    passed_before = set(Path(passed).read_text().splitlines()) if passed and Path(passed).exists() else set()
    number, count = map(int, os.environ.get("KVQ_SHARD", "0/1").split("/"))
    left = [item for item in items if item.nodeid not in passed_before]
    items[:] = [item for index, item in enumerate(left) if index % count == number]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    report = (yield).get_result()
    if RESULTS is None or (report.when != "call" and report.passed):
        return
    row = {"test": item.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
    if report.failed:
        row["why"] = report.longreprtext[-4000:]
    with Path(RESULTS).open("a") as file:
        file.write(json.dumps(row) + "\n")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
        session.exitstatus = pytest.ExitCode.OK  # all its tests passed before, or other processes run them

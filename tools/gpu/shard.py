"""pytest plugin (`-p gpu.shard`): run every n-th test, leave out those that passed before, record each result.

KVQ_SHARD=I/N: of N processes this is the I-th. KVQ_TEST_RESULTS=FILE: a JSON line per test is appended to it.
KVQ_TEST_PASSED=FILE: names of tests, one per line, that are not run again.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

RESULTS = os.environ.get("KVQ_TEST_RESULTS")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    passed = os.environ.get("KVQ_TEST_PASSED", "")
    known = set(Path(passed).read_text().splitlines()) if passed and Path(passed).exists() else set()
    number, count = map(int, os.environ.get("KVQ_SHARD", "0/1").split("/"))
    left = [item for item in items if item.nodeid not in known]
    items[:] = [item for index, item in enumerate(left) if index % count == number]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
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
        session.exitstatus = pytest.ExitCode.OK  # another process has them, or they passed before

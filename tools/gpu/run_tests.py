"""Run pytest in N processes, each with every N-th test, and write the results to `tests.json`.

    python tools/gpu/run_tests.py --out DIR [--jobs N] [--fresh] PYTEST_ARGUMENTS...

Tests that passed in an earlier run into the same folder are not run again, unless with --fresh, or if kernels, kvq_cli,
tests, PyTorch or Triton have changed since. Exit code 1 if a test failed or a process ended with an error.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvq_cli.benchmarking.machine import kernels_digest

TOOLS = Path(__file__).parents[1]
ROOT = TOOLS.parent


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--fresh", action="store_true")
    options, pytest_arguments = parser.parse_known_args()
    options.out.mkdir(parents=True, exist_ok=True)
    result = options.out / "tests.json"
    sources = sources_of(pytest_arguments)
    kept = [] if options.fresh or not result.exists() else passed_before(json.loads(result.read_text()), sources)
    start = time.monotonic()
    codes = run(options.out, options.jobs, kept, pytest_arguments)
    rows = kept + read_rows(options.out, options.jobs)
    failed = [row for row in rows if row["outcome"] == "failed"]
    document = {
        "seconds": round(time.monotonic() - start, 1),
        "passed": sum(row["outcome"] == "passed" for row in rows),
        "skipped": sum(row["outcome"] == "skipped" for row in rows),
        "failed": len(failed),
        "exit_codes": codes,
        "sources": sources,
        "tests": sorted(rows, key=lambda row: row["test"]),
    }
    result.write_text(json.dumps(document, indent=1) + "\n")
    for row in failed:
        print(f"FAILED {row['test']}\n{row['why'][-1500:]}")
    for number, code in enumerate(codes):
        if code not in (0, 1):
            print(f"process {number} ended with {code}: see {options.out / f'shard-{number}.log'}")
    print("{passed} passed, {failed} failed, {skipped} skipped in {seconds} s".format(**document))
    print(f"written: {result}")
    return 1 if failed or any(codes) else 0


def sources_of(pytest_arguments: Sequence[str]) -> dict[str, str]:
    """Return what a test's outcome depends on: hashes of sources and versions of packages."""
    given = [Path(word.split("::")[0]) for word in pytest_arguments if not word.startswith("-")]
    files = {path for folder in ("tests", "kvq_cli") for path in (ROOT / folder).rglob("*.py")}
    files |= {path.resolve() for path in given if path.is_file()}
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:16]
    packages = {name: version(name) for name in ("torch", "triton")}
    return {"kernels": kernels_digest(), "tests and kvq_cli": digest, **packages}


def passed_before(document: dict[str, Any], sources: dict[str, str]) -> list[dict[str, Any]]:
    """Return the rows of passed tests of an earlier result, none if it is of other sources."""
    known = document.get("sources", {})
    changed = [name for name, value in sources.items() if known.get(name) != value]
    if changed:
        print(f"all tests are run again, since these have changed: {', '.join(changed)}")
        return []
    return [row for row in document["tests"] if row["outcome"] == "passed"]


def run(out: Path, jobs: int, kept: list[dict[str, Any]], pytest_arguments: list[str]) -> list[int]:
    """Run the processes and return their exit codes."""
    passed = out / "passed.txt"
    passed.write_text("".join(f"{row['test']}\n" for row in kept))
    processes = []
    for number in range(jobs):
        rows_of(out, number).unlink(missing_ok=True)
        environment = os.environ | {
            "KVQ_SHARD": f"{number}/{jobs}",
            "KVQ_TEST_RESULTS": str(rows_of(out, number)),
            "KVQ_TEST_PASSED": str(passed),
            "PYTHONPATH": os.pathsep.join([str(TOOLS), os.environ.get("PYTHONPATH", "")]),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        }
        command = [sys.executable, "-m", "pytest", "-p", "gpu.shard", "-p", "no:cacheprovider", *pytest_arguments]
        log = (out / f"shard-{number}.log").open("w")
        processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    return [process.wait() for process in processes]


def rows_of(out: Path, number: int) -> Path:
    """Return the file for the results of process `number`."""
    return out / f"shard-{number}.jsonl"


def read_rows(out: Path, jobs: int) -> list[dict[str, Any]]:
    """Return the results of all processes."""
    paths = [rows_of(out, number) for number in range(jobs)]
    return [json.loads(line) for path in paths if path.exists() for line in path.read_text().splitlines()]


if __name__ == "__main__":
    sys.exit(main())

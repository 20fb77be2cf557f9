"""Say which long test suites must run again: those whose sources changed since they last passed.

python tools/verified.py needs SUITE    exit code 0 if it must run, else 1
python tools/verified.py record SUITE   store the digest of its sources in tests/verified.json

A suite's sources are its tests, the modules that these import, directly or not (grimp), their data files, and pinned
versions. Comments and layout of Python do not count. `make test` and `make test-changed` run what needs it; `make
test-all` runs everything and records it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "tests/verified.json"
PACKAGES = {"kvq_cli": ROOT / "kvq_cli", "kvq_kernels": ROOT / "kernels/kvq_kernels"}


@dataclass(frozen=True)
class Suite:
    """tests: files and folders. modules: what they import by name only, such as subcommands. files: other sources.
    ignored: tests that the suite's command leaves out. pins: packages whose pinned versions it depends on."""

    tests: tuple[str, ...]
    modules: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    pins: tuple[str, ...] = ()


#: What kernels are tested with.
KERNEL_PINS = ("numpy", "pytest", "torch", "triton")
#: Files of kernels' tests with slow ones; below, what all of them share.
LAUNCHES = ("cache_keys", "compiled", "oldest_triton", "outliers", "several_queries", "static", "transform_attention")
KERNEL_HELPERS = ("tests/kernels/conftest.py", "tests/kernels/checks", "tests/kernels/ptx")
SUITES = {
    "slow": Suite(
        ("tests",),
        ("kvq_cli", "kvq_kernels"),
        ("artifacts", "constraints.txt", "pyproject.toml"),
        ignored=("tests/kernels", "tests/lab", "tests/docs", "tests/tools/test_gpu_commands.py"),
    ),
    "vllm": Suite(
        ("tests/vllm/engine", "tests/vllm/platform"),
        ("kvq_cli.vllm", "kvq_cli.cli.serve", "kvq_cli.methods"),
        ("tools/vllm", "constraints.txt"),
    ),
    "families": Suite((*KERNEL_HELPERS, "tests/kernels/test_compiled.py"), ("kvq_kernels",), pins=KERNEL_PINS),
    "launches": Suite(
        (*KERNEL_HELPERS, *(f"tests/kernels/test_{name}.py" for name in LAUNCHES)),
        ("kvq_kernels",),
        pins=KERNEL_PINS,
    ),
    "gpu": Suite(
        ("tests/tools/test_gpu_commands.py", "tests/kernels/test_compiled.py", "tests/attention/test_on_gpu.py"),
        ("kvq_kernels", "kvq_cli.benchmarking.kernels", "kvq_cli.cli.bench_kernels", "kvq_cli.cli.bench_generate"),
        ("tools/gpu", "tools/fake_gpu", "constraints.txt"),
    ),
}


def sources(suite: Suite) -> list[Path]:
    """All files that the result of a suite depends on, sorted."""
    import grimp

    graph = grimp.build_graph(*PACKAGES)
    left_out = set(files_below(*suite.ignored))
    tests = [path for path in files_below(*suite.tests) if path not in left_out]
    helpers = {path.stem: path for path in files_below("tests/support", "tests/kernels")}
    for path in tests:  # grows: the helpers that tests and other helpers import
        if path.suffix == ".py":
            tests += [helpers[name] for name in imported(path) if name in helpers and helpers[name] not in tests]
    named = {name for path in tests if path.suffix == ".py" for name in imported(path) if name in graph.modules}
    named.update(*({name, *graph.find_descendants(name)} for name in suite.modules))
    modules = named.union(*(graph.find_upstream_modules(module) for module in named))
    folders = {path.parent for path in map(path_of, modules)}
    data = {path for folder in folders for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    return sorted({*tests, ROOT / "tests/conftest.py", *files_below(*suite.files), *map(path_of, modules), *data})


def files_below(*names: str) -> list[Path]:
    """The files of `names`, and those in the folders among them, that git knows."""
    if not names:
        return []
    listed = subprocess.run(["git", "ls-files", "--", *names], cwd=ROOT, capture_output=True, text=True, check=True)
    return [path for path in map(ROOT.joinpath, listed.stdout.splitlines()) if path.is_file() and path != RECORD]


def imported(path: Path) -> set[str]:
    """The modules that a file imports, and `module.name` of each name that it imports from one."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def path_of(module: str) -> Path:
    """The file of a module."""
    package, _, rest = module.partition(".")
    path = PACKAGES[package].joinpath(*rest.split(".")) if rest else PACKAGES[package]
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def digest(suite: Suite) -> str:
    """SHA-256 of the names and contents of a suite's sources; of Python, without comments and layout."""
    value = hashlib.sha256()
    for path in sources(suite):
        content = ast.dump(ast.parse(path.read_bytes())).encode() if path.suffix == ".py" else path.read_bytes()
        value.update(f"{path.relative_to(ROOT)} {hashlib.sha256(content).hexdigest()}\n".encode())
    if suite.pins:
        for line in (ROOT / "constraints.txt").read_text().splitlines():
            if line.partition("==")[0] in suite.pins:
                value.update(f"{line}\n".encode())
    return value.hexdigest()


def recorded() -> dict[str, str]:
    """The digest of each suite when it last passed."""
    return json.loads(RECORD.read_text()) if RECORD.exists() else {}


def main(action: str, name: str) -> int:
    """Exit code of a command; see the module's text."""
    if action == "needs":
        return int(recorded().get(name) == digest(SUITES[name]))
    RECORD.write_text(json.dumps(recorded() | {name: digest(SUITES[name])}, indent=2, sort_keys=True) + "\n")
    return 0


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    sys.exit(main(*sys.argv[1:]))

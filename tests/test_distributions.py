"""The wheel and the sdist, built from the tree, have the files of both packages, and run without the checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import kvq_cli
from kvq_cli.methods.registry import method_names

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
METADATA = f"kvq_cli-{kvq_cli.__version__}.dist-info/"
pytestmark = pytest.mark.slow


def tracked(*folders: str) -> list[str]:
    listed = subprocess.run(["git", "ls-files", "--", *folders], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


def build(kind: str, source: Path, out: Path) -> Path:
    """Build a `wheel` or an `sdist` of a source tree with the installed setuptools."""
    subprocess.run(
        [sys.executable, "-c", BUILD, f"build_{kind}", str(out)], cwd=source, check=True, stdout=subprocess.DEVNULL
    )
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The tree without results and pages, which are no sources; building leaves files in it."""
    folder = tmp_path_factory.mktemp("source")
    for name in tracked(":!results", ":!docs", ":!benchmarks", ":!artifacts"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Runs programs of an environment that has the wheel, and no other kvq: dependencies are this environment's."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet", "--no-index"]
    # Without the checkout on Python's path, whose egg-info would pass for an installed kvq.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([*pip, "--no-deps", "--disable-pip-version-check", wheel], check=True, cwd=folder, env=environment)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path alone: the .pth files there, such as an editable kvq's, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def run(program: str, *arguments: str) -> str:
        command = [str(folder / "bin" / program), *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run.folder = folder
    return run


def test_the_wheel_has_the_tracked_files_of_both_packages_alone(wheel):
    packages = [name.removeprefix("kernels/") for name in tracked("kvq_cli", "kernels/kvq_kernels")]
    assert {name for name in names(wheel) if not name.startswith(METADATA)} == set(packages)
    assert f"{METADATA}licenses/LICENSE" in names(wheel)


def test_the_sdist_builds_the_same_wheel(source, wheel, tmp_path):
    sdist = build("sdist", source, tmp_path)
    shutil.unpack_archive(sdist, tmp_path)
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    assert not {"tests", "lab", "tools"} & {path.name for path in unpacked.iterdir()}
    assert names(build("wheel", unpacked, tmp_path)) == names(wheel)


def test_the_installed_wheel_runs_without_the_checkout(installed):
    assert installed("kvq", "--version") == f"kvq {kvq_cli.__version__}\n"
    where = installed("python", "-c", "import kvq_cli, kvq_kernels; print(kvq_cli.__file__, kvq_kernels.__file__)")
    assert all(Path(file).is_relative_to(installed.folder) for file in where.split())
    listed = {row["name"] for row in json.loads(installed("kvq", "methods", "--json"))}
    assert listed == set(method_names())
    assert json.loads(installed("kvq", "bits", "--papers", "--json"))  # published tables
    assert re.search(r"table-temporalkv-6 .* to do", installed("kvq", "reproduce"))
    prompt = "The special magic number for calm-oak is 3390561. What is the special magic number for calm-oak?"
    options = ("--method", "kivi", "--bits", "2", "--set", "residual=32", "-n", "8", "--json")
    answer = json.loads(installed("kvq", "generate", prompt, *options))
    assert answer["cache"]["compressed_tokens"] > 0 and answer["new_tokens"] > 0

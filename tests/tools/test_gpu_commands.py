"""The `make gpu-*` commands in the GPU machine's environment, on a fake GPU, with packed kernels."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEVICE = ROOT / ".venv/device/bin/python"
COMMANDS = ("gpu-test", "gpu-bench", "gpu-tune", "gpu-growth")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not DEVICE.exists(), reason="the GPU machine's environment is missing: make test-all installs it"
    ),
]


def make(*words: str, **environment: str) -> str:
    """Run `make`, which must succeed, and return its output."""
    known = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "MAKEFLAGS")}
    command = ["make", "-C", str(ROOT), f"PYTHON={DEVICE}", "DRY=1", *words]
    done = subprocess.run(command, env=known | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def test_the_environment_has_no_optional_packages():
    """A GPU machine may lack them."""
    code = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    names = ["datasets", "faiss", "accelerate", "matplotlib", "hypothesis", "lm_eval", "wonderwords"]
    assert subprocess.run([DEVICE, "-c", code, *names], capture_output=True, text=True).stdout.strip() == "[]"


def test_commands_launch_only_packed_kernels(tmp_path):
    """`gpu-pack` compiles the kernels; then the commands run from another folder with compilation forbidden."""
    packed = tmp_path / "pack.tar.xz"
    make("gpu-pack", f"GPU_OUT={tmp_path / 'here'}", f"GPU_PACK={packed}", f"DEVICE={DEVICE}", "GPU_JOBS=1")
    logs = list((tmp_path / "here/packing").glob("*.log"))
    assert sorted(path.stem for path in logs) == ["bench", "growth", "test", "tune"]
    there = [f"GPU_OUT={tmp_path / 'there'}", f"GPU_PACK={packed}", "GPU_JOBS=2"]
    printed = make("gpu", *there, KVQ_COMPILE="forbid")
    compiled = re.findall(r"(\d+) kernels were compiled, (\d+) were in the cache", printed)
    assert len(compiled) == 5 and {count for count, _ in compiled} == {"0"} and int(compiled[0][1]) > 20
    place = tmp_path / "there/dry"
    assert json.loads((place / "tests.json").read_text())["failed"] == 0
    kernels = json.loads((place / "kernels.json").read_text())
    assert kernels["machine"]["device"].startswith("NVIDIA H200") and all(row["right"] for row in kernels["checked"])
    assert not [row for row in kernels["rows"] if "failed" in row and not row["baseline"]]
    growth = json.loads((place / "growth.json").read_text())
    assert {"kvq kivi-2bit", "kvq temporalkv-2bit"} <= set(growth["measured"])
    assert {row["backend"] for row in growth["rows"]} == {None, "triton, steps as CUDA graphs"}
    archives = {path.name for path in (tmp_path / "there").glob("*.tar.gz")}
    assert archives == {f"{name}.tar.gz" for name in COMMANDS}


def test_gpu_tests_are_collected_without_optional_packages():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
    command = [
        DEVICE,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-m",
        "gpu",
        "tests/kernels",
        "tests/attention/test_on_gpu.py",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]

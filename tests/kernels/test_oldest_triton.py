"""Compiled code of the oldest supported Triton, which `make test-all` sets up in the GPU machine's environment."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path

import pytest
from kvq_kernels.static import LIMITS, SHARED

OLDEST = Path(__file__).parents[2] / ".venv/device/bin/python"
#: Some of each family, and the operations beside attention.
NAMES = ["fp16", "kivi-2bit-g32", "kivi-3bit-g32", "innerq-2bit-hybrid", "channel-2bit", "temporal-2bit"]
NAMES += ["keys-inner-2bit-hybrid", "keys-outer-2bit-symmetric", "values-inner-3bit-asymmetric"]
NAMES += ["values-outer-2bit-inside"]
OPERATIONS = ["assign_centroids", "quantize_pack", "rematerialize", "squat_quantize"]

oldest = pytest.mark.skipif(not OLDEST.exists(), reason="it is not installed: make test-all does it")


def run(*arguments: str) -> str:
    """What a Python program prints in the environment with this version of Triton."""
    known = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment = known | {"PYTHONPATH": str(Path(__file__).parents[2] / "kernels")}
    done = subprocess.run([OLDEST, *arguments], env=environment, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.stdout


@oldest
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's disassembler is part of its wheel for x86_64")
def test_it_compiles_to_as_few_instructions():
    """Registers are another matter: its assembler spills some bytes, beside the main loops; 208 in SQuat's kernel."""
    command = ["-m", "kvq_kernels.static", "--json", "--targets", "sm_90", "--jobs", "1"]
    found = json.loads(run(*command, *NAMES, *OPERATIONS))
    assert {one["name"] for one in found} >= set(NAMES) and {one["operation"] for one in found} >= set(OPERATIONS)
    for one in found:
        assert one["error"] is None, one
        assert one["shared"] <= SHARED["sm_90"], one
        assert one["spills"] <= (208 if one["operation"] == "squat_quantize" else 48), one
        assert one["i2f"] == 0 or one["kind"] not in ("uniform", "codebook"), one
        assert one["per_number"] <= LIMITS.get(one["kind"], float("inf")), one

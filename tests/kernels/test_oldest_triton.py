"""What the oldest Triton that the package asks for makes of the kernels: `make test` sets it up beside the newest."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from kvq_kernels.static import LIMITS, SHARED

OLDEST = Path(sys.prefix) / "oldest"
#: One of each family, and the operations beside attention.
NAMES = ["fp16", "kivi-2bit-g32", "kivi-3bit-g32", "innerq-2bit-hybrid", "channel-2bit", "temporal-2bit"]
OPERATIONS = ["assign_centroids", "quantize_pack", "quantized_matvec", "rematerialize", "squat_quantize"]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's disassembler is part of its wheel for x86_64")
@pytest.mark.skipif(not (OLDEST / "triton").exists(), reason="the oldest Triton is not installed: make test does it")
def test_it_compiles_to_as_few_instructions():
    """Registers are another matter: its assembler spills some bytes, beside the main loops; 208 in SQuat's kernel."""
    paths = os.pathsep.join([str(OLDEST), *filter(None, sys.path)])
    command = [sys.executable, "-m", "kvq_kernels.static", "--json", "--targets", "sm_90", "--jobs", "1"]
    done = subprocess.run(
        [*command, *NAMES, *OPERATIONS], env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert {one["name"] for one in found} >= set(NAMES) and {one["operation"] for one in found} >= set(OPERATIONS)
    for one in found:
        assert one["error"] is None, one
        assert one["shared"] <= SHARED["sm_90"], one
        assert one["spills"] <= (208 if one["operation"] == "squat_quantize" else 48), one
        assert one["i2f"] == 0 or one["kind"] not in ("uniform", "codebook"), one
        assert one["per_number"] <= LIMITS.get(one["kind"], float("inf")), one

"""Keys of compiled kernels do not depend on which kernel a process launches first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kvq_kernels.aot_cases import operations

ROOT = Path(__file__).parents[2]
#: Prints {kernel: key} after the operations were launched in the order given.
PROGRAM = """
import importlib, json, sys
import triton
from kvq_kernels.cache_keys import hash_callees_first
modules = [importlib.import_module(f"kvq_kernels.{name}.launch") for name in sys.argv[2:]]
for module in modules if sys.argv[1] == "fixed" else []:
    hash_callees_first(module.__name__)
kernels = [v for m in modules for v in vars(m).values() if isinstance(v, triton.JITFunction)]
print(json.dumps({f"{v.__module__}.{v.__name__}": v.cache_key for v in kernels}))
"""


def keys(how: str, names: list[str]) -> dict[str, str]:
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = known | {"PYTHONPATH": str(ROOT / "kernels")}
    command = [sys.executable, "-c", PROGRAM, how, *names]
    return json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)


def test_keys_do_not_depend_on_the_order_of_launches():
    names = operations()
    assert len(names) == 8
    expected = keys("fixed", names)
    assert "kvq_kernels.decode_attention.kernel.split_kernel" in expected
    assert keys("fixed", names[::-1]) == expected
    alone = keys("fixed", ["transform_attention"])  # as in a process that launches nothing else
    assert alone and alone.items() <= expected.items()


PROGRAM_OF_READERS = """
import triton, triton.language as tl
from dataclasses import replace
from kvq_kernels.aot_cases import launches
from kvq_kernels.decode_attention.formats.shared import nothing
from kvq_kernels.static import TARGETS, describe
launch = launches("decode_attention", "sm_90")["kivi-2bit-g32"]

def key(**functions):
    loop = launch.constants["K"]
    constants = {**launch.constants, "K": replace(loop, reader=replace(loop.reader, **functions))}
    return describe(replace(launch, constants=constants), TARGETS["sm_90"]).hash()

assert key() == key(table=nothing)  # its own
assert key() != key(queries=nothing)
spec = launch.constants["K"].S
before = spec.cache_key
type(spec).element = nothing
assert spec.cache_key != before
"""


def test_keys_depend_on_functions_that_are_called_through_constants():
    """Functions of a format, which Triton does not find by their names."""
    known = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment = known | {"PYTHONPATH": str(ROOT / "kernels")}
    subprocess.run([sys.executable, "-c", PROGRAM_OF_READERS], env=environment, check=True)


@pytest.mark.slow
def test_triton_needs_it():
    """Without it keys differ: if this fails, Triton was mended, and `cache_keys` can go."""
    names = operations()
    if keys("as it is", names) == keys("as it is", names[::-1]):
        pytest.fail("Triton's keys no longer depend on the order: remove kvq_kernels/cache_keys.py")

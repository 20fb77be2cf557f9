"""Lets the tests of kernels import what they share, and moves them to the GPU where there is one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # for kernel_cases

if "KVQ_TEST_PTX" in os.environ:
    from ptx.driver import activate

    activate(os.environ["KVQ_TEST_PTX"])
elif not torch.cuda.is_available():
    collect_ignore = ["test_compiled.py"]  # which is about no source that is interpreted


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("gpu")
    # What compiles for minutes begins first, so that the other test process has work meanwhile.
    items.sort(key=lambda item: item.path.name != "test_static.py")


@pytest.fixture(autouse=True)
def on_the_gpu():
    """Kernels run where they are made for; without a GPU in the interpreter."""
    if not torch.cuda.is_available():
        yield
        return
    from kernel_device import OnDevice

    with OnDevice("cuda"):
        yield

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
    # What compiles for minutes begins first, so that the other test process has work meanwhile.
    items.sort(key=lambda item: item.path.name != "test_static.py")


@pytest.fixture(autouse=True)
def on_the_gpu(request):
    """Tests that are marked `gpu` make their tensors on the GPU, where there is one."""
    if not torch.cuda.is_available() or request.node.get_closest_marker("gpu") is None:
        yield
        return
    from kernel_device import on_device

    with on_device("cuda"):
        yield

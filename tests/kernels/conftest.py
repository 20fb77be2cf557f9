"""Makes shared modules importable in kernel tests, and puts their tensors on the GPU where there is one."""

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
    collect_ignore = ["test_compiled.py"]  # needs compiled kernels


def pytest_collection_modifyitems(items):
    # test_static.py compiles for minutes: it begins first, while another test process does the other tests.
    items.sort(key=lambda item: item.path.name != "test_static.py")


@pytest.fixture(autouse=True)
def on_the_gpu(request):
    """Tests marked `gpu` create their tensors on the GPU, where there is one."""
    if not torch.cuda.is_available() or request.node.get_closest_marker("gpu") is None:
        yield
        return
    from kernel_device import on_device

    with on_device("cuda"):
        yield

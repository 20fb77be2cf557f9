"""Kernels are launched on the GPU of their tensors, whichever is current."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch
from kvq_kernels.aot_cases import operations
from kvq_kernels.launch_device import on_its_device


@pytest.fixture
def current(monkeypatch):
    """Devices that are current, the newest last, of a machine with several GPUs."""
    devices = [0]

    @contextmanager
    def selected(device):
        devices.append(device.index)
        yield
        devices.pop()

    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[-1])
    monkeypatch.setattr(torch.cuda, "device", selected)
    return devices


@pytest.mark.parametrize(("name", "during"), [("cuda:1", [0, 1]), ("cuda:0", [0]), ("cpu", [0])])
def test_the_tensors_gpu_is_current_during_a_launch(name, during, current):
    launch = on_its_device(lambda tensor, *, scale: (list(current), scale))
    assert launch(SimpleNamespace(device=torch.device(name)), scale=3) == (during, 3)
    assert current == [0]


@pytest.mark.parametrize("operation", operations())
def test_every_launch_selects_the_device(operation):
    module = import_module(f"kvq_kernels.{operation}.launch")
    launches = [value for name, value in vars(module).items() if name.startswith("run_")]
    assert launches and all(inspect.unwrap(launch) is not launch for launch in launches)

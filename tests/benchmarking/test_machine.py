"""The description of a GPU in benchmark results."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
import torch

from kvq_cli.benchmarking import machine

UUID = "1a2b3c4d-0000-1111-2222-333344445555"


@pytest.mark.parametrize(
    ("hip", "name", "architecture"), [(None, "NVIDIA H200", "sm_90"), ("6.3.1", "gfx942:sramecc+", "gfx942")]
)
@pytest.mark.parametrize(("uuid", "asked"), [({"uuid": UUID}, f"--id=GPU-{UUID}"), ({}, "--id=2")])
def test_a_gpu_is_named_by_its_architecture_and_found_by_its_uuid(monkeypatch, hip, name, architecture, uuid, asked):
    """CUDA_VISIBLE_DEVICES renumbers torch's devices, but not nvidia-smi's."""
    sizes = {"multi_processor_count": 132, "total_memory": 1 << 30, "L2_cache_size": 1 << 20}
    properties = SimpleNamespace(name=name, gcnArchName=name, major=9, minor=0, **sizes, **uuid)
    commands = []

    def run(command, **_):
        commands.append(command)
        return SimpleNamespace(stdout="570.1, 1980, 1980, 3201, 3201\n")

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr("kvq_kernels.tuning._properties", lambda index: properties)
    monkeypatch.setattr(subprocess, "run", run)
    found = machine._gpu(torch.device("cuda", 2))
    assert found["architecture"] == architecture
    assert asked in commands[0] and (found["driver_version"], found["clocks.mem"]) == ("570.1", "3201")

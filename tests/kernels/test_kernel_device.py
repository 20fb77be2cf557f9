"""`kernel_device` with a device that every machine has."""

from __future__ import annotations

import torch
from kernel_device import on_device


def test_new_tensors_are_created_on_the_device():
    generator = torch.Generator().manual_seed(0)
    with on_device("meta"):
        assert torch.arange(3).device.type == torch.logspace(0, 1, 3).device.type == "meta"
        assert torch.randn(2, generator=generator).device.type == "meta"
        assert torch.tensor([1.0]).device.type == "meta"
        assert torch.zeros(2, device="cpu").device.type == "cpu"
    assert torch.zeros(2).device.type == "cpu"

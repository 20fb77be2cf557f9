"""Tensors of a test on a device that it does not name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode


class _RandomNumbers(TorchFunctionMode):
    """Draw on the CPU what a CPU's generator is given for, and move it: every device sees the same numbers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is None or generator.device.type != "cpu" or kwargs.get("device") is not None:
            return func(*args, **kwargs)
        return func(*args, **kwargs | {"device": "cpu"}).to(self._device)


@contextmanager
def on_device(name: str) -> Iterator[None]:
    """Inside the block, new tensors are made on a device unless their maker is told another."""
    device = torch.device(name)
    with device, _RandomNumbers(device):
        yield

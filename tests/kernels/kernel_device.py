"""Creates a test's tensors on another device without changes to the test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.overrides import TorchFunctionMode


class _RandomNumbers(TorchFunctionMode):
    """Draw random numbers with a CPU generator on the CPU and move them: the same numbers on every device."""

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
    """Inside the block, new tensors are created on a device unless another is given."""
    device = torch.device(name)
    with device, _RandomNumbers(device):
        yield
